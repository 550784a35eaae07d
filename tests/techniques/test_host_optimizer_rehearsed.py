"""An optimizer on the host, rehearsed: no state on the GPU, and a clock that shows what waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from oomph.hardware import find_gpu
from oomph.hardware.timing.clock import Clock
from oomph.rehearsal.host_memory import CORES_REACH
from oomph.rehearsal.link import HOST_ADAM, REACHED, RehearsedLink
from oomph.rehearsal.recorder import Recorder
from oomph.rehearsal.world import pretend
from oomph.techniques.host_optimizer import HostOptimizer
from oomph.techniques.host_placement import HostPlacement
from oomph.techniques.host_step import MADE, STEPPED
from oomph.techniques.master_weights import MasterWeights

GPU = find_gpu("h200")
LAYERS, WIDTH = 12, 1024
WEIGHT = 4 * WIDTH * WIDTH
"""Bytes of a layer in fp32."""
LINK = REACHED * GPU.host_link
SLACK = 1 << 20
"""Bytes of norms, counters and the like."""


@dataclass
class Rehearsed:
    """What a job with its optimizer on the host does, step by step."""

    recorder: Recorder
    model: nn.Module
    host: HostOptimizer
    batch: Tensor
    at_rest: int
    """GPU bytes of weights and batch, workspaces aside."""
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)

    def step(self) -> None:
        recorder = self.recorder
        begun = recorder.seconds
        loss = self.model(self.batch).sum()
        self.forward.append(recorder.seconds - begun)
        begun = recorder.seconds
        with self.host.backward():
            loss.backward()
        self.backward.append(recorder.seconds - begun)
        self.host.step()

    @property
    def extra(self) -> int:
        """GPU bytes that the step holds beyond weights, batch and workspaces."""
        workspaces = sum(
            b.size
            for b in self.recorder.timeline.blocks
            if b.death is None and b.category.value == "workspace"
        )
        return self.recorder.allocated - self.at_rest - workspaces


@contextmanager
def rehearsed(
    *,
    rows: int = 64,
    clip_norm: float | None = 1.0,
    masters: bool = False,
    **placement: int | float,
) -> Iterator[Rehearsed]:
    with pretend(GPU) as recorder:
        recorder.clock = Clock(gpu=GPU)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(LAYERS)]
        model = nn.Sequential(*layers).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        kept = MasterWeights(model, optimizer) if masters else None
        host = HostOptimizer(
            model,
            optimizer,
            RehearsedLink(recorder, GPU),
            HostPlacement(**{"bucket": WEIGHT, **placement}),  # type: ignore[arg-type]
            masters=kept,
            clip_norm=clip_norm,
        )
        dtype = torch.bfloat16 if masters else torch.float32
        batch = torch.empty(rows, WIDTH, dtype=dtype, device="cuda")
        yield Rehearsed(recorder, model, host, batch, recorder.allocated)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("masters", [False, True])
def test_state_takes_no_gpu_memory_between_steps(
    masters: bool, share: float, clip_norm: float | None
) -> None:
    with rehearsed(clip_norm=clip_norm, masters=masters, host_share=share) as job:
        weight = WEIGHT // 2 if masters else WEIGHT
        assert job.at_rest - LAYERS * weight < SLACK + job.batch.nbytes
        for _ in range(3):
            job.step()
            job.host.settle()
            assert job.extra < SLACK
        states = 3 if masters else 2
        assert job.recorder.timeline.host_bytes >= states * LAYERS * WEIGHT


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_what_is_under_way_is_what_buckets_take(ahead: int) -> None:
    with rehearsed(ahead=ahead, keep_gradients=0) as job:
        job.step()
        job.step()
        job.recorder.reset_peak()
        before = job.recorder.allocated - job.extra
        job.host.settle()
        # Some come, states and gradients; as many leave, and the one that was stepped last.
        under_way = job.recorder.peak_allocated - before
        most = ahead * 3 * WEIGHT + (ahead + 1) * 2 * WEIGHT
        assert 2 * ahead * 2 * WEIGHT <= under_way <= most + SLACK


def test_gradients_without_room_leave_while_backward_goes_on() -> None:
    with rehearsed(keep_gradients=2 * WEIGHT) as job:
        job.step()
        job.host.settle()
        loss = job.model(job.batch).sum()
        job.recorder.reset_peak()
        rest = job.recorder.allocated
        with job.host.backward():
            loss.backward()
        # Two may stay, two are on their way, one is being made; two buckets of state come in.
        assert job.recorder.peak_allocated - rest <= (2 + 2 + 1 + 2 * 2) * WEIGHT + SLACK
        job.host.step()


def test_a_bound_step_takes_as_long_as_the_link() -> None:
    """With next to nothing to compute, what is exposed is the way in."""
    with rehearsed() as job:
        for _ in range(3):
            job.step()
        way_in = 2 * LAYERS * WEIGHT / LINK
        assert job.forward[-1] == pytest.approx(way_in, rel=0.25)


def test_what_came_before_the_norm_was_known_is_not_waited_for() -> None:
    """Backward brings state as it ends, and the forward, which is too short for all, finds it."""
    waits = {}
    for early in (1, 5):
        with rehearsed(rows=1 << 10, early=early, ahead=1) as job:
            for _ in range(3):
                job.step()
            waits[early] = job.forward[-1] - job.forward[0]
    # The last of them are still on their way.
    way_in = (5 - 1) * 2 * WEIGHT / LINK
    assert 0.5 * way_in < waits[1] - waits[5] <= way_in


def test_early_state_takes_the_memory_that_it_has_and_no_more() -> None:
    peaks = {}
    for early in (1, 2, 5):
        with rehearsed(early=early, ahead=1) as job:
            job.step()
            loss = job.model(job.batch).sum()
            job.host.settle()
            job.recorder.reset_peak()
            with job.host.backward():
                loss.backward()
            peaks[early] = job.recorder.peak_allocated
            job.host.step()
    assert peaks[2] - peaks[1] == pytest.approx(2 * WEIGHT, abs=SLACK)
    assert peaks[5] - peaks[1] == pytest.approx(4 * 2 * WEIGHT, abs=SLACK)


def test_a_long_forward_hides_all_but_the_beginning() -> None:
    with rehearsed(rows=1 << 16) as job:
        for _ in range(3):
            job.step()
        way_in = 2 * LAYERS * WEIGHT / LINK
        assert job.forward[-1] - job.forward[0] < 0.15 * way_in


def test_a_long_backward_hides_steps_inside_it() -> None:
    with rehearsed(rows=1 << 16, clip_norm=None) as job:
        for _ in range(3):
            job.step()
        way_in = 2 * LAYERS * WEIGHT / LINK
        assert job.backward[-1] - job.backward[0] < 0.15 * way_in
        assert job.forward[-1] == pytest.approx(job.forward[0])


def test_the_host_takes_its_time() -> None:
    with rehearsed(host_share=1.0) as job:
        for _ in range(3):
            job.step()
        scaled = (STEPPED + MADE) / STEPPED
        stepping = LAYERS * WIDTH * WIDTH * scaled / (CORES_REACH * HOST_ADAM)
        assert job.forward[-1] == pytest.approx(stepping, rel=0.35)
        assert job.forward[-1] > stepping


def test_undo_brings_the_state_back() -> None:
    with rehearsed() as job:
        job.step()
        job.host.undo()
        assert job.extra == pytest.approx(2 * LAYERS * WEIGHT, abs=SLACK)


@pytest.mark.parametrize("masters", [False, True])
def test_state_that_is_only_made_takes_what_a_first_step_would(masters: bool) -> None:
    taken = []
    for makes in (False, True):
        with rehearsed(masters=masters) as job:
            if makes:
                job.host.make_state()
            else:
                job.step()
            job.step()
            job.recorder.reset_peak()
            job.step()
            taken.append((job.recorder.peak_allocated, job.forward[-1]))
    assert taken[0] == pytest.approx(taken[1])
