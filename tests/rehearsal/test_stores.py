"""State, weights and gradients on the disk in a rehearsal: their room, the memory they leave free,
and the time they take."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from switched_on import on
from torch import nn

from oomph.hardware import find_gpu
from oomph.hardware.timing.clock import Clock
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.rehearsal import stores as slots
from oomph.rehearsal.link import RehearsedLink
from oomph.rehearsal.phases import rehearse
from oomph.rehearsal.step_cost import peak_allocated, step_cost
from oomph.rehearsal.timeline import Timeline
from oomph.rehearsal.world import pretend

H200 = find_gpu("h200")
WIDTH, LAYERS = 1024, 12
WEIGHTS = LAYERS * WIDTH**2
#: Adam's two moments of each weight.
STATE = 2 * 4 * WEIGHTS
HOST = Choices(optimizer_on="host", techniques=on("fused_optimizer"))


def rehearsed(clip_norm: float | None = None, rows: int = 8, **changes: object) -> Timeline:
    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    job = Job(
        model,
        lambda net, batch: net(batch).sum(),
        "adamw",
        torch.ones(rows, WIDTH),
        clip_norm=clip_norm,
    )
    choices = dataclasses.replace(HOST, **changes)  # type: ignore[arg-type]
    return rehearse(job, H200, ("build", "step"), choices=choices, clock=Clock.of(H200))


def seconds(timeline: Timeline) -> float:
    return step_cost(timeline, 1).kernels


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_what_is_on_the_disk_is_not_in_host_memory(share: float, clip_norm: float | None) -> None:
    none, some = rehearsed(clip_norm), rehearsed(clip_norm, disk_share=share)
    assert none.disk_bytes == 0
    assert some.disk_bytes == share * STATE
    buffers = some.host_bytes - (none.host_bytes - share * STATE)
    assert 0 < buffers < STATE / 4


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_step_takes_as_long_as_the_disk(
    clip_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "DISK_READ", 1e9)
    monkeypatch.setattr(slots, "DISK_WRITE", 0.5e9)
    monkeypatch.setattr(slots, "load_profile", lambda _: None)
    took = seconds(rehearsed(clip_norm, disk_share=1.0))
    # What the last buffers hold is written while the next step begins.
    assert 0.7 * (STATE / 1e9 + STATE / 0.5e9) < took < 1.1 * (STATE / 1e9 + STATE / 0.5e9)


AWAY = tuple(str(at) for at in range(LAYERS))
COLD: dict[str, object] = {"weights_away": AWAY, "weights_away_on": "disk"}


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("masters", [False, True])
def test_weights_on_the_disk_are_not_in_host_memory_and_take_no_more_of_the_gpu(
    masters: bool, clip_norm: float | None
) -> None:
    how: dict[str, object] = {"weights_away": AWAY}
    if masters:
        how |= {"weights": "bf16 with fp32 masters", "precision": "bf16-mixed"}
    host, disk = (rehearsed(clip_norm, **how, weights_away_on=on) for on in ("host", "disk"))
    size = (2 if masters else 4) * WEIGHTS
    assert (host.disk_bytes, disk.disk_bytes) == (0, size)
    buffers = disk.host_bytes - (host.host_bytes - size)
    assert 0 < buffers < size / 4
    assert peak_allocated(host) == peak_allocated(disk)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_such_a_step_reads_weights_twice_and_writes_them_once(
    share: float, clip_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "DISK_READ", 1e9)
    monkeypatch.setattr(slots, "DISK_WRITE", 0.5e9)
    monkeypatch.setattr(slots, "load_profile", lambda _: None)
    took = seconds(rehearsed(clip_norm, disk_share=share, **COLD))
    size = 4 * WEIGHTS
    expected = (2 * size + share * STATE) / 1e9 + (size + share * STATE) / 0.5e9
    # The last blocks of forward are the first of backward; all that is written is on one disk.
    assert 0.75 * expected < took < 1.1 * expected


GRADIENTS: dict[str, object] = {"gradient_room": 0, "gradients_on": "disk"}


@pytest.mark.parametrize(("clip_norm", "parts"), [(1.0, 1), (None, 4), (1.0, 4)])
@pytest.mark.parametrize("masters", [False, True])
def test_gradients_on_the_disk_are_not_in_host_memory_and_take_no_more_of_the_gpu(
    masters: bool, clip_norm: float | None, parts: int
) -> None:
    how: dict[str, object] = {"gradient_room": 0, "micro_batch": 8 // parts if parts > 1 else None}
    if masters:
        how |= {"weights": "bf16 with fp32 masters", "precision": "bf16-mixed"}
    host, disk = (rehearsed(clip_norm, **how, gradients_on=on) for on in ("host", "disk"))
    # There is room for parts that add up, in fp32; alone they leave in the type of their weights.
    assert (host.disk_bytes, disk.disk_bytes) == (0, 4 * WEIGHTS)
    taken = (2 if masters and parts == 1 else 4) * WEIGHTS
    buffers = disk.host_bytes - (host.host_bytes - taken)
    assert 0 < buffers < WEIGHTS
    assert peak_allocated(host) == peak_allocated(disk)


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("masters", [False, True])
def test_such_a_step_writes_gradients_once_and_reads_them_once(
    masters: bool, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "DISK_READ", 1e9)
    monkeypatch.setattr(slots, "DISK_WRITE", 0.5e9)
    monkeypatch.setattr(slots, "load_profile", lambda _: None)
    how = dict(GRADIENTS)
    if masters:
        how |= {"weights": "bf16 with fp32 masters", "precision": "bf16-mixed"}
    took = seconds(rehearsed(1.0, disk_share=share, **how))
    size = (2 if masters else 4) * WEIGHTS
    moved = size + share * (STATE + (4 * WEIGHTS if masters else 0))
    expected = moved / 1e9 + moved / 0.5e9
    assert 0.7 * expected < took < 1.1 * expected


def test_what_was_never_written_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As gradients of a step that is not rehearsed, or weights that were on the disk before."""
    monkeypatch.setattr(slots, "DISK_READ", 1e9)
    monkeypatch.setattr(slots, "load_profile", lambda _: None)
    with pretend(H200) as recorder:
        recorder.clock = Clock.of(H200)
        target = torch.empty(1000, 1000, device="cuda")
        link = RehearsedLink(recorder, H200)
        store = slots.RehearsedStore(recorder, link, H200, largest=target.nbytes, buffers=1)
        began = recorder.seconds
        store.get(store.slot(target.nbytes), target).wait()
        assert recorder.seconds - began == pytest.approx(target.nbytes / 1e9, rel=0.2)


def test_a_disk_that_is_fast_enough_hides_behind_computing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = 1 << 17
    monkeypatch.setattr(slots, "load_profile", lambda _: None)
    monkeypatch.setattr(slots, "DISK_READ", 1e12)
    monkeypatch.setattr(slots, "DISK_WRITE", 1e12)
    fast = seconds(rehearsed(rows=rows, disk_share=0.5))
    assert fast == pytest.approx(seconds(rehearsed(rows=rows)), rel=0.02)
    fast = seconds(rehearsed(rows=rows, **COLD))
    away = seconds(rehearsed(rows=rows, weights_away=AWAY))
    assert fast == pytest.approx(away, rel=0.02)
