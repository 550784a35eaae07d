"""What `oomph.watch()` costs while nothing happens: `python -m benchmarks.watch_overhead`.

A few steps with it and a few without it, in many short rounds: what else runs on a machine comes in
bursts, and longer blocks do not average it away. A round has its blocks in random order and gives
the ratio of their seconds. Prints the median of those ratios with a 95 % interval, once for a card
that is busy all the time and once for a host that is, which is the worst case for a watcher. Beside
it the same for steps without it against steps without it: how much of this is noise.

The first notes of a run are taken whatever they cost, so they are taken before the clock starts. On
a GPU with its own counters; without one, with a meter that takes as long to read as those do.
`--out` names a JSON file for all of it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from oomph.explaining.logbook import ALWAYS, Logbook, Notes
from oomph.explaining.meters import CudaMeter, Meter, Reading, Refusal, Sample

#: Seconds for which each case is measured, and rounds it has at least.
SECONDS, LEAST_ROUNDS = 8.0, 10
#: Steps of a block: the first ones, in which a new watch looks for models, are not timed.
BEFORE, TIMED = 2, 2
#: What a step of the card should take.
STEP_SECONDS = 10e-3
READING_SECONDS = 60e-6
RESAMPLES = 4000
#: Kinds of blocks.
PLAIN, AGAIN, WATCHED = "plain", "plain again", "watched"


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


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """How much longer than others some steps take: the median over rounds, as a part."""

    median: float
    low: float
    high: float
    """From `low` to here with a probability of 95 %."""

    def __str__(self) -> str:
        return (
            f"{100 * self.median:.2f} % (95 % interval {100 * self.low:.2f} to"
            f" {100 * self.high:.2f})"
        )


@dataclass(frozen=True, kw_only=True)
class Case:
    """What was measured of one kind of step."""

    busy: str
    device: str
    step_seconds: float
    """The median without watching."""
    overhead: Overhead
    noise: Overhead
    """Of steps without watching, against themselves."""
    rounds: list[dict[str, float]]
    """Seconds of a step, by kind of block."""


def overhead(seconds: ArrayLike, others: ArrayLike) -> Overhead:
    """How much longer than the others', round by round; the interval by drawing rounds again."""
    ratios = np.divide(seconds, others)
    drawn = np.random.default_rng(0).integers(len(ratios), size=(RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(ratios[drawn], axis=1), [0.025, 0.975])
    return Overhead(median=float(np.median(ratios)) - 1, low=float(low) - 1, high=float(high) - 1)


class Training:
    """Steps of a chain of layers, and a clock for blocks of them."""

    def __init__(self, *, device: str, layers: int, width: int, rows: int) -> None:
        self._device = device
        parts = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers))
        self._net = nn.Sequential(*parts).to(device)
        # Learning nothing: the thousandth step has the numbers of the first, and takes as long.
        self._optimizer = torch.optim.AdamW(self._net.parameters(), lr=0.0)
        self._batch = torch.ones(rows, width, device=device)

    def fill(self, seconds: float) -> None:
        """Grow the batch until a step takes about as long."""
        while (taken := self.clock()) < 0.8 * seconds:
            times = min(max(seconds / taken, 1.1), 4.0)
            rows = int(len(self._batch) * times) + 1
            self._batch = self._batch[:1].expand(rows, -1).contiguous()

    def clock(self) -> float:
        """Seconds of a step, over a block of them."""
        for _ in range(BEFORE):
            self._step()
        self._wait()
        began = time.perf_counter()
        for _ in range(TIMED):
            self._step()
        self._wait()
        return (time.perf_counter() - began) / TIMED

    def _step(self) -> None:
        self._net(self._batch).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


class Watching:
    """A clock for blocks of steps in the middle of a run that is watched."""

    def __init__(self, training: Training, meter: Meter) -> None:
        self._training, self._meter, self._notes = training, meter, Notes()
        for step in range(ALWAYS):
            self._notes.take(meter, step)

    def clock(self) -> float:
        """Seconds of a step that is watched."""
        logbook = Logbook(self._meter)
        logbook.notes = self._notes  # goes on at its pace
        with logbook.open():
            return self._training.clock()


def measure(training: Training, *, busy: str, device: str, seconds: float) -> Case:
    """Rounds of all kinds of blocks, for so many seconds."""
    meter: Meter = CudaMeter() if device == "cuda" else _SlowMeter()
    kinds: dict[str, Callable[[], float]] = {
        PLAIN: training.clock,
        AGAIN: training.clock,
        WATCHED: Watching(training, meter).clock,
    }
    order, draw = list(kinds), random.Random(0)
    rounds: list[dict[str, float]] = []
    end = time.perf_counter() + seconds
    while len(rounds) < LEAST_ROUNDS or time.perf_counter() < end:
        draw.shuffle(order)
        rounds.append({kind: kinds[kind]() for kind in order})
    plain, again, watched = ([one[kind] for one in rounds] for kind in kinds)
    return Case(
        busy=busy,
        device=device,
        step_seconds=float(np.median(plain)),
        overhead=overhead(watched, np.mean([plain, again], axis=0)),
        noise=overhead(again, plain),
        rounds=rounds,
    )


@contextlib.contextmanager
def little_to_look_through() -> Iterator[None]:
    """Hide all objects there are now from whoever looks for models, as each new watch does."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both cases and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each case")
    given = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = []
    Training(device=device, layers=1, width=8, rows=1).clock()  # imports whatever steps need
    with little_to_look_through():
        wide = 2048 if device == "cuda" else 256
        card = Training(device=device, layers=8, width=wide, rows=64)
        card.fill(STEP_SECONDS)
        host = Training(device=device, layers=48, width=128, rows=32)
        host.clock()  # the first steps are slower
        for busy, training in (("card", card), ("host", host)):
            case = measure(training, busy=busy, device=device, seconds=given.seconds)
            cases.append(case)
            print(
                f"a step on {device} with a busy {busy}: {1e3 * case.step_seconds:.2f} ms,"
                f" {len(case.rounds)} rounds\n"
                f"  overhead: {case.overhead}\n"
                f"  noise:    {case.noise}",
                flush=True,
            )
    if given.out is not None:
        document = {"torch": torch.__version__, "cases": [asdict(case) for case in cases]}
        given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
