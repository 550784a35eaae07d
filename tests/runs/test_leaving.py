"""Choices that leave the device: the same numbers, and everything is back after undo."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from deferred_link import CountingLink
from shared_link import SharedLink
from small_plans import plan_with
from switched_on import on
from torch import Tensor, nn

from oomph.engine.applying import Applied, apply_choices
from oomph.engine.step import train_step
from oomph.errors import BadInput, DiskDamaged, DiskFull, HostMemoryFull
from oomph.hardware import find_gpu
from oomph.hardware.timing.clock import Clock
from oomph.jobs.job import Job
from oomph.memory import evicted_to_disk as parked_on_disk
from oomph.memory.limits import HostLimits
from oomph.memory.scratch_file import ScratchFile
from oomph.plans.choices import Choices
from oomph.plans.plan import Plan
from oomph.rehearsal.phases import rehearse
from oomph.rehearsal.timeline import Category
from oomph.runs.run import Run, apply, fit, free_host_memory
from oomph.search.planner import plan

WIDTH = 64
STATE = ("step", "exp_avg", "exp_avg_sq")


class Counting(CountingLink, SharedLink):
    """That the disk's threads may wait for."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)))


def job(**options: Any) -> Job:
    torch.manual_seed(1)
    batch = torch.randn(8, 256, WIDTH), torch.randn(8, 256, WIDTH)
    return Job(model, nn.MSELoss(), "adamw", batch, **options)


def trained(choices: Choices, given: Job, steps: int = 4) -> list[Tensor]:
    """The losses and then the weights."""
    made = model()
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
    stage, undo = apply_choices(choices, given, made, optimizer, device_type="cpu")
    losses = [train_step(stage, given.batch) for _ in range(steps)]
    stage.settle()
    undo()
    state = [optimizer.state[p][name] for p in made.parameters() for name in STATE]
    return [*losses, *(p.detach() for p in made.parameters()), *state]  # type: ignore[list-item]


PATHS = [str(at) for at in range(4)]
PLAIN = Choices(blocks=dict.fromkeys(PATHS, "keep"))
OFFLOADED = dict.fromkeys(PATHS, "recompute, offloaded")
ON_DISK = dataclasses.replace(PLAIN, blocks=OFFLOADED, offloaded_to="disk")


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer_on": "host"},
        {"optimizer_on": "host", "micro_batch": 3},
        {"optimizer_on": "host", "gradient_room": 0},
        {"blocks": dict.fromkeys(PATHS, "keep, offloaded")},
        {"blocks": dict.fromkeys(PATHS, "recompute, offloaded")},
        {"blocks": {**dict.fromkeys(PATHS, "keep"), "1": "keep, offloaded #1"}},
        {"blocks": dict.fromkeys(PATHS, "recompute, offloaded"), "optimizer_on": "host"},
        {"blocks": dict.fromkeys(PATHS, "keep, offloaded"), "offloaded_to": "disk"},
        {"blocks": OFFLOADED, "offloaded_to": "disk", "micro_batch": 3},
        {"blocks": OFFLOADED, "offloaded_to": "disk", "optimizer_on": "host"},
        {
            "blocks": OFFLOADED,
            "offloaded_to": "disk",
            "optimizer_on": "host",
            "weights_away": ("1", "2"),
            "disk_share": 1.0,
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("clip", [None, 0.5], ids=["no clipping", "clipping"])
def test_numbers_are_those_of_what_stays(change: dict[str, Any], clip: float | None) -> None:
    given = job(clip_norm=clip)
    leaves = dataclasses.replace(PLAIN, **change)
    stays = dataclasses.replace(PLAIN, micro_batch=leaves.micro_batch)
    torch.testing.assert_close(trained(leaves, given), trained(stays, given), rtol=0, atol=0)


MASTERS = dataclasses.replace(PLAIN, precision="bf16-mixed", weights="bf16 with fp32 masters")
COLD: dict[str, Any] = {"weights_away": ("1", "2"), "weights_away_on": "disk"}


def everything_may_go_to_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small it is."""
    monkeypatch.setattr("oomph.techniques.disk_state.LEAST", 0)
    monkeypatch.setattr("oomph.techniques.disk_weights.LEAST", 0)


@pytest.mark.parametrize("micro_batch", [None, 3])
@pytest.mark.parametrize("clip", [None, 0.5], ids=["no clipping", "clipping"])
@pytest.mark.parametrize(
    "change", [{}, {"disk_share": 0.5}, {"weights_away": ("1", "2")}, COLD], ids=str
)
def test_masters_on_the_disk_have_the_numbers_of_what_stays(
    change: dict[str, Any],
    clip: float | None,
    micro_batch: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everything_may_go_to_the_disk(monkeypatch)
    given = job(clip_norm=clip, precision="bf16-mixed")
    stays = dataclasses.replace(MASTERS, micro_batch=micro_batch)
    on_disk = dataclasses.replace(stays, optimizer_on="host", disk_share=1.0)
    leaves = dataclasses.replace(on_disk, **change)
    ours, theirs = trained(leaves, given, steps=5), trained(stays, given, steps=5)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


GRADIENTS = dataclasses.replace(
    PLAIN, optimizer_on="host", gradient_room=0, gradients_on="disk", micro_batch=3
)


@pytest.mark.parametrize("micro_batch", [None, 3])
@pytest.mark.parametrize("clip", [None, 0.5], ids=["no clipping", "clipping"])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"gradient_room": 200_000},
        {"disk_share": 0.5},
        {"gpu_share": 0.5},
        {"weights_away": ("1", "2")},
        COLD,
        {"blocks": OFFLOADED, "offloaded_to": "disk", "disk_share": 1.0, **COLD},
    ],
    ids=str,
)
def test_gradients_on_the_disk_have_the_numbers_of_what_stays(
    change: dict[str, Any],
    clip: float | None,
    micro_batch: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everything_may_go_to_the_disk(monkeypatch)
    given = job(clip_norm=clip)
    leaves = dataclasses.replace(GRADIENTS, **{"micro_batch": micro_batch, **change})
    stays = dataclasses.replace(PLAIN, micro_batch=micro_batch)
    torch.testing.assert_close(trained(leaves, given), trained(stays, given), rtol=0, atol=0)


def test_micro_batches_may_be_switched_while_gradients_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one alone they leave in the type of their weights, and in a larger one to add up."""
    everything_may_go_to_the_disk(monkeypatch)
    given = job(clip_norm=0.5, precision="bf16-mixed")
    own = {"precision": "bf16-mixed", "weights": "bf16 with fp32 masters"}
    found = []
    for choices in (GRADIENTS, dataclasses.replace(PLAIN, micro_batch=3)):
        made, link = model(), Counting()
        optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
        choices = dataclasses.replace(choices, **own)  # type: ignore[arg-type]
        applied = Applied(
            choices,
            given,
            made,
            optimizer,
            device_type="cpu",
            link_with=lambda _, link=link: link,  # type: ignore[misc]
            disk=tmp_path,
        )
        losses = []
        for size in (None, 3, None, 2):
            applied.switch(dataclasses.replace(choices, micro_batch=size))
            losses.append(train_step(applied.stage, given.batch))
        applied.undo()
        assert not link.live
        found.append([*losses, *(parameter.detach() for parameter in made.parameters())])
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("clip", [None, 0.5], ids=["no clipping", "clipping"])
def test_a_disk_without_room_for_gradients_ends_the_first_step_and_changes_nothing(
    clip: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything_may_go_to_the_disk(monkeypatch)
    given = job(clip_norm=clip)
    plain = dataclasses.replace(PLAIN, micro_batch=3)
    run, expected = (running(choices, given, tmp_path) for choices in (GRADIENTS, plain))
    with monkeypatch.context() as patch:
        patch.setattr(ScratchFile, "_free", lambda _: 1 << 10)
        with pytest.raises(DiskFull, match="is missing"):
            run.step(given.batch)
    assert run.steps == 0 and not run.optimizer.state
    for _ in range(2):
        assert torch.equal(run.step(given.batch), expected.step(given.batch))
    for one in (run, expected):
        one.undo()
    assert all(torch.equal(*pair) for pair in zip(weights(run), weights(expected), strict=True))
    assert not list(tmp_path.iterdir())


def test_a_gradient_that_cannot_be_read_ends_the_step_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything_may_go_to_the_disk(monkeypatch)
    given = job()
    plain = dataclasses.replace(PLAIN, micro_batch=3)
    run, expected = (running(choices, given, tmp_path) for choices in (GRADIENTS, plain))

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    assert torch.equal(run.step(given.batch), expected.step(given.batch))
    with monkeypatch.context() as patch:
        patch.setattr(ScratchFile, "read", fail)
        with pytest.raises(DiskDamaged, match="cannot be read: Input/output error"):
            run.step(given.batch)
    assert run.steps == 1
    for _ in range(2):
        assert torch.equal(run.step(given.batch), expected.step(given.batch))
    for one in (run, expected):
        one.undo()
    assert all(torch.equal(*pair) for pair in zip(weights(run), weights(expected), strict=True))


@pytest.mark.parametrize("change", [{}, COLD], ids=["masters", "masters and weights"])
def test_a_step_that_fails_with_masters_on_the_disk_changes_nothing(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything_may_go_to_the_disk(monkeypatch)
    given = job(clip_norm=0.5, precision="bf16-mixed")
    on_disk = dataclasses.replace(MASTERS, optimizer_on="host", disk_share=1.0, **change)
    runs = []
    for choices in (on_disk, MASTERS):
        made = model()
        optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
        own = dataclasses.replace(given, model=made, optimizer=optimizer)
        runs.append(apply(plan_with(choices, made, optimizer, given.batch), own, disk=tmp_path))
    run, expected = runs
    for one in runs:
        one.step(given.batch)
    with pytest.raises(ZeroDivisionError):
        fail_in_backward(run.model)
        run.step(given.batch)
    for one in runs:
        one.step(given.batch)
    assert run.evaluate([given.batch]) == expected.evaluate([given.batch])
    assert torch.equal(run.step(given.batch), expected.step(given.batch))
    for one in runs:
        one.undo()
    for ours, theirs in zip(run.model.parameters(), expected.model.parameters(), strict=True):
        assert ours.dtype == torch.float32 and torch.equal(ours, theirs)


@pytest.mark.parametrize("change", [{}, COLD], ids=["masters", "masters and weights"])
def test_a_run_that_host_memory_has_no_room_for_is_not_undone(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything_may_go_to_the_disk(monkeypatch)
    made, given = model(), job(precision="bf16-mixed")
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
    choices = dataclasses.replace(MASTERS, optimizer_on="host", disk_share=1.0, **change)
    own = dataclasses.replace(given, model=made, optimizer=optimizer)
    run = apply(plan_with(choices, made, optimizer, given.batch), own, disk=tmp_path)
    run.step(given.batch)
    needed = 12 * sum(p.numel() for p in made.parameters())
    if change:  # two of four blocks, and one while it is read, whose last bias has 256 bytes
        needed += 3 * 2 * sum(p.numel() for p in made[1].parameters()) + 256 - 2 * WIDTH
    with monkeypatch.context() as patch:
        tiny = HostLimits(memory=needed - 1, memory_limit="a tiny machine", lockable=None)
        patch.setattr("oomph.memory.limits.host_limits", lambda *_: tiny)
        with pytest.raises(HostMemoryFull, match="1 B is missing"):
            run.undo()
        run.step(given.batch)
        with pytest.raises(HostMemoryFull, match="1 B is missing"), taken_back(run):
            pass
        run.step(given.batch)
    run.undo()
    expected = trained(MASTERS, given, steps=3)
    assert all(torch.equal(*pair) for pair in zip(made.parameters(), expected[3:11], strict=False))


def test_a_disk_that_is_full_in_the_first_step_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = job()
    run, expected = (running(choices, given, tmp_path) for choices in (ON_DISK, PLAIN))
    with monkeypatch.context() as patch:
        patch.setattr(ScratchFile, "_free", lambda _: 1 << 18)
        with pytest.raises(DiskFull, match="is missing"):
            run.step(given.batch)
    assert run.steps == 0
    assert not run.optimizer.state
    assert all(torch.equal(*pair) for pair in zip(weights(run), weights(expected), strict=True))
    for _ in range(2):
        assert torch.equal(run.step(given.batch), expected.step(given.batch))
    for one in (run, expected):
        one.undo()
    assert all(torch.equal(*pair) for pair in zip(weights(run), weights(expected), strict=True))
    assert not list(tmp_path.iterdir())


def running(choices: Choices, given: Job, folder: Path) -> Run:
    made = model()
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
    own = dataclasses.replace(given, model=made, optimizer=optimizer)
    return apply(plan_with(choices, made, optimizer, given.batch), own, disk=folder)


def weights(run: Run) -> list[Tensor]:
    return [parameter.detach().cpu() for parameter in run.model.parameters()]


def test_where_blocks_are_offloaded_to_is_switched_and_the_other_place_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parked_on_disk, "PIECE", 100_000)
    ring = 100_000 * parked_on_disk.BUFFERS
    given, made, link = job(), model(), Counting()
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
    on_host = dataclasses.replace(ON_DISK, offloaded_to="host")
    applied = Applied(
        on_host,
        given,
        made,
        optimizer,
        device_type="cpu",
        link_with=lambda _: link,
        disk=tmp_path,
    )
    inputs = 3 * given.batch[0].nbytes  # but for the first block's, which is the batch
    losses, held = [], []
    for choices in (on_host, ON_DISK, PLAIN, ON_DISK, on_host):
        applied.switch(choices)
        losses.append(train_step(applied.stage, given.batch))
        held.append(sum(link.live.values()))
    assert held == [inputs, ring, 0, ring, inputs]
    applied.undo()
    assert not link.live
    expected = trained(PLAIN, given, steps=5)
    torch.testing.assert_close(losses, expected[:5], rtol=0, atol=0)
    mine = [parameter.detach() for parameter in made.parameters()]
    torch.testing.assert_close(mine, expected[5 : 5 + len(mine)], rtol=0, atol=0)


def taken_back(run: Run) -> Any:
    return run._adapting._applied.taken_back()


def fail_in_backward(of: nn.Module) -> None:
    """Once."""

    def fail(_: Tensor) -> None:
        handle.remove()
        raise ZeroDivisionError

    handle = next(of.parameters()).register_hook(fail)


def test_the_hosts_own_steps_are_equal_but_for_the_last_bits() -> None:
    choices = dataclasses.replace(PLAIN, optimizer_on="host", host_share=1.0)
    torch.testing.assert_close(trained(choices, job()), trained(PLAIN, job()), rtol=1e-5, atol=1e-6)


def test_an_optimizer_on_the_host_takes_no_memory_of_the_card_between_steps() -> None:
    choices = dataclasses.replace(PLAIN, optimizer_on="host", precision="fp32")
    h200 = find_gpu("h200")
    timeline = rehearse(job(), h200, choices=choices, clock=Clock.of(h200))
    evaluated = next(span for span in timeline.spans if span.name == "eval")
    alive = timeline.alive_at(evaluated.stop - 1)
    weights = sum(p.numel() for p in model().parameters())
    state = sum(b.size for b in alive if b.category is Category.OPTIMIZER)
    assert state < weights  # of 8 bytes for each: the counters alone
    assert timeline.host_bytes >= 8 * weights


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer_on": "disk"},
        {"optimizer_on": "host", "techniques": on("low_bit_state")},
        {"optimizer_on": "host", "techniques": on("cuda_graph")},
        {"host_share": 0.5},
        {"optimizer_on": "host", "host_share": 1.5},
        {"blocks": {"0": "keep, offloaded 1"}},
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        Choices(**options)


def test_undo_leaves_a_model_that_can_be_copied() -> None:
    made = model()
    optimizer = torch.optim.AdamW(made.parameters())
    choices = dataclasses.replace(
        PLAIN, optimizer_on="host", blocks=dict.fromkeys(PATHS, "recompute, offloaded")
    )
    given = job()
    stage, undo = apply_choices(choices, given, made, optimizer, device_type="cpu")
    train_step(stage, given.batch)
    undo()
    twin = copy.deepcopy(made)
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), made.parameters(), strict=True))


def test_a_plan_for_more_host_memory_than_there_is_is_refused_before_anything_changes() -> None:
    made = model()
    optimizer = torch.optim.AdamW(made.parameters())
    given = dataclasses.replace(job(), model=made, optimizer=optimizer)
    fits = plan(given, budget="1GiB")
    more = dataclasses.replace(fits, predicted=dataclasses.replace(fits.predicted, host=1 << 60))
    with pytest.raises(HostMemoryFull, match="is missing"):
        apply(more, given)
    apply(fits, given).undo()


def with_disk(nbytes: int) -> tuple[Plan, Job]:
    """A job, and a plan for it that says it takes so much of the disk."""
    made = model()
    given = dataclasses.replace(job(), model=made, optimizer=torch.optim.AdamW(made.parameters()))
    fits = plan(given, budget="1GiB")
    predicted = dataclasses.replace(fits.predicted, disk=nbytes)
    return dataclasses.replace(fits, predicted=predicted), given


def test_a_plan_for_more_disk_than_there_is_is_refused_before_anything_changes(
    tmp_path: Path,
) -> None:
    more, given = with_disk(1 << 60)
    with pytest.raises(DiskFull, match=f"on the disk of {tmp_path}"):
        apply(more, given, disk=tmp_path)
    with pytest.raises(BadInput, match="name one that exists"):
        apply(more, given, disk=tmp_path / "nowhere")
    apply(dataclasses.replace(more, predicted=with_disk(1)[0].predicted), given).undo()


def test_a_folder_in_memory_takes_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = HostLimits(memory=100, memory_limit="a tiny machine", lockable=None, disk_is_memory=True)
    monkeypatch.setattr("oomph.memory.limits.host_limits", lambda *_: tiny)
    monkeypatch.setattr("oomph.runs.run.host_limits", lambda *_: tiny)
    enough, given = with_disk(100)
    apply(enough, given, disk=tmp_path).undo()
    with pytest.raises(HostMemoryFull, match="1 B is missing"):
        apply(with_disk(101)[0], given, disk=tmp_path)


@pytest.mark.parametrize("named", [True, False], ids=["named", "by default"])
def test_state_on_the_disk_goes_to_the_folder(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Any] = []

    class Told(Applied):
        def __init__(self, *args: Any, disk: Any = None, **options: Any) -> None:
            folders.append(disk)
            super().__init__(*args, disk=disk, **options)

    monkeypatch.setattr("oomph.runs.run.Applied", Told)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "other"))
    (tmp_path / "other").mkdir()
    _, given = with_disk(0)
    assert isinstance(given.model, nn.Module) and isinstance(given.optimizer, torch.optim.AdamW)
    folder = {"disk": str(tmp_path)} if named else {}
    fit(given.model, given.optimizer, given.loss, given.batch, budget="1GiB", **folder).undo()
    assert folders == [tmp_path if named else tmp_path / "other"]


def test_free_host_memory_counts_weights_that_are_there_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = HostLimits(memory=1000, memory_limit="the machine", lockable=None)
    monkeypatch.setattr("oomph.runs.run.host_limits", lambda: limits)
    on_host, weights = model(), 4 * sum(p.numel() for p in model().parameters())
    assert free_host_memory(on_host, torch.device("cuda")) == 950 + weights
    assert free_host_memory(model, torch.device("cuda")) == 950
    assert free_host_memory(on_host, torch.device("cpu")) is None
