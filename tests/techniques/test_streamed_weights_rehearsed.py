"""Streamed weights, rehearsed: a few blocks on the GPU, and a clock that shows what waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from oomph.hardware import find_gpu
from oomph.hardware.timing.clock import Clock
from oomph.plans.choices import KEEP, RECOMPUTE
from oomph.rehearsal.compiled import stand_in_for_compiled
from oomph.rehearsal.link import REACHED, RehearsedLink
from oomph.rehearsal.recorder import Recorder
from oomph.rehearsal.world import pretend
from oomph.techniques.host_optimizer import HostOptimizer
from oomph.techniques.host_placement import HostPlacement
from oomph.techniques.recompute import recompute
from oomph.techniques.streamed_weights import StreamedWeights

GPU = find_gpu("h200")
LAYERS, WIDTH = 8, 2048
BLOCK = 2 * 4 * WIDTH * WIDTH
"""Bytes of a block's weights in fp32."""
BUCKET, BUCKETS = BLOCK // 4, 2
"""Bytes that are stepped together, and how many of these may be under way."""
LINK = REACHED * GPU.host_link
SLACK = 1 << 20
"""Bytes of placeholders, results of a row or two and the like."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x))


@dataclass
class Rehearsed:
    recorder: Recorder
    model: nn.Module
    host: HostOptimizer
    batch: Tensor
    autocast: bool = False

    @property
    def workspaces(self) -> int:
        """GPU bytes that kernels keep for themselves."""
        blocks = self.recorder.timeline.blocks
        return sum(b.size for b in blocks if b.death is None and b.category.value == "workspace")

    def forward(self) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16) if self.autocast else nullcontext():
            return self.model(self.batch).float().sum()

    def step(self) -> None:
        loss = self.forward()
        with self.host.backward():
            loss.backward()
        self.host.step()
        self.host.settle()

    def evaluate(self) -> float:
        begun = self.recorder.seconds
        with torch.no_grad():
            self.model(self.batch)
        return self.recorder.seconds - begun


@contextmanager
def rehearsed(
    *,
    rows: int = 1,
    ahead: int = 1,
    recomputes: bool = False,
    compiled: bool = False,
    autocast: bool = False,
) -> Iterator[Rehearsed]:
    with pretend(GPU) as recorder:
        recorder.clock = Clock(gpu=GPU)
        model = nn.Sequential(*(Block() for _ in range(LAYERS))).to("cuda")
        for block in model if compiled else ():
            stand_in_for_compiled(block, RECOMPUTE if recomputes else KEEP, recorder=recorder)
        for block in model if recomputes and not compiled else ():
            recompute(block)
        optimizer = torch.optim.AdamW(model.parameters())
        link = RehearsedLink(recorder, GPU)
        paths = [str(at) for at in range(LAYERS)]
        streamed = StreamedWeights(model, paths, link, ahead=ahead)
        # All that the GPU has of the step are gradients on their way out.
        placement = HostPlacement(host_share=1.0, bucket=BUCKET, ahead=BUCKETS)
        host = HostOptimizer(model, optimizer, link, placement, weights=streamed)
        batch = torch.empty(rows, WIDTH, device="cuda", requires_grad=True)
        yield Rehearsed(recorder, model, host, batch, autocast)


HOWS: dict[str, dict[str, bool]] = {
    "kept": {},
    "recomputed": {"recomputes": True},
    "autocast": {"autocast": True},
    "recomputed under autocast": {"recomputes": True, "autocast": True},
    "compiled": {"compiled": True},
    "compiled and recomputed": {"compiled": True, "recomputes": True},
}


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_the_gpu_holds_the_blocks_that_run_and_come(ahead: int, how: dict[str, bool]) -> None:
    with rehearsed(ahead=ahead, **how) as job:
        assert job.recorder.allocated < SLACK
        job.step()
        here = (1 + ahead) * BLOCK
        casts = BLOCK // 2 if job.autocast else 0
        job.recorder.reset_peak()
        loss = job.forward()
        assert here <= job.recorder.peak_allocated - job.workspaces <= here + casts + SLACK
        with job.host.backward():
            loss.backward()
        # One gradient is made while others leave; autocast's is made in two types.
        gradients = BUCKETS * BUCKET + BLOCK + casts
        assert job.recorder.peak_allocated - job.workspaces <= here + casts + gradients + SLACK
        assert job.recorder.timeline.host_bytes >= LAYERS * BLOCK


def test_without_gradients_a_forward_takes_as_long_as_the_link_where_there_is_little_to_do() -> (
    None
):
    with rehearsed() as job:
        job.evaluate()
        assert job.evaluate() == pytest.approx(LAYERS * BLOCK / LINK, rel=0.1)


def test_a_long_forward_hides_the_copies() -> None:
    with rehearsed(rows=1 << 16) as job:
        job.evaluate()
        hidden = job.evaluate()
        assert hidden > 1.2 * LAYERS * BLOCK / LINK
    with rehearsed(rows=1 << 16, ahead=0) as job:
        job.evaluate()
        exposed = job.evaluate()
    # With nothing coming ahead, every block's copy is waited for.
    assert exposed - hidden == pytest.approx(LAYERS * BLOCK / LINK, rel=0.1)
