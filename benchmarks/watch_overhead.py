"""What `oomph.watch()` costs while nothing happens: a step with it beside a step without it.

python -m benchmarks.watch_overhead

On a GPU with its own counters; without one, with a meter that takes as long to read as those do.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor, nn

from oomph.explaining.logbook import Logbook
from oomph.explaining.meters import CudaMeter, Meter, Reading, Refusal, Sample

ROUNDS, STEPS = 15, 60
READING_SECONDS = 60e-6


class _SlowMeter:
    """Knows nothing, and takes its time to say so."""

    device = "none"
    gpu: str | None = None
    refusal: Refusal | None = None

    def is_ready(self) -> bool:
        return True

    def sample(self) -> Sample:
        began = time.perf_counter()
        while time.perf_counter() - began < READING_SECONDS:
            pass
        return Sample(allocated=1, reserved=1, peak=1)

    def read(self) -> Reading:
        return Reading(allocated=1, reserved=1, limit=1, total=1, free=0, hidden=0)

    def holds(self, tensor: Tensor) -> bool:
        return False


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    meter: Meter = CudaMeter() if on_gpu else _SlowMeter()
    # Small layers: the host is busy all the time, which is the worst case for a watcher.
    layers = (nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(48))
    net = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(net.parameters())
    batch = torch.ones(32, 128, device=device)

    def seconds_per_step() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(STEPS):
            net(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / STEPS

    seconds_per_step()
    plain, watched = [], []
    for _ in range(ROUNDS):
        plain.append(seconds_per_step())
        with Logbook(meter).open():
            seconds_per_step()  # the first notes are taken whatever they cost
            watched.append(seconds_per_step())
    # The fastest rounds: what else runs on the machine only ever adds.
    before, after = min(plain), min(watched)
    print(f"a step on {device}: {1e3 * before:.3f} ms, watched {1e3 * after:.3f} ms")
    print(
        f"overhead: {after / before - 1:+.2%} (median {_median(watched) / _median(plain) - 1:+.2%})"
    )


def _median(seconds: list[float]) -> float:
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
