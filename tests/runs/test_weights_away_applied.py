"""Choices that keep weights on the host: the same numbers, little on the card, all back by undo."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deferred_link import CountingLink
from safetensors.torch import load_file
from scarce_disk import ScarceDisk
from small_plans import plan_with
from switched_on import on
from torch import Tensor, nn

from benchmarks.profiler_memory import measure_cpu_peak
from oomph.engine.applying import Applied
from oomph.engine.step import train_step
from oomph.errors import BadInput, DiskFull
from oomph.hardware import find_gpu
from oomph.hardware.timing.clock import Clock
from oomph.jobs.job import Job
from oomph.memory.link import Copy, InstantLink
from oomph.plans.choices import Choices, Outside
from oomph.plans.fidelity import Fidelity
from oomph.rehearsal.phases import rehearse
from oomph.rehearsal.timeline import Category, Timeline
from oomph.runs.loading import _load_model
from oomph.runs.run import Run, apply
from oomph.runs.saving import plain_model_state
from oomph.search.changes import describe_changes
from oomph.techniques.step_buckets import bucket_bytes
from oomph.techniques.watched_tensors import own_work

WIDTH, LAYERS = 64, 4
STATE = ("step", "exp_avg", "exp_avg_sq")
PATHS = tuple(f"blocks.{at}" for at in range(LAYERS))
PLAIN = Choices(blocks=dict.fromkeys(PATHS, "keep"))
AWAY = dataclasses.replace(PLAIN, optimizer_on="host", weights_away=PATHS)
COLD = dataclasses.replace(AWAY, weights_away_on="disk")


@pytest.fixture(autouse=True)
def _every_parameter_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oomph.techniques.disk_weights.LEAST", 0)
    monkeypatch.setattr("oomph.techniques.disk_state.LEAST", 0)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Net(nn.Module):
    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(width, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.register_buffer("shift", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(self.first(x)) + self.shift
        return out


def job(width: int = WIDTH, layers: int = LAYERS, **options: Any) -> Job:
    torch.manual_seed(1)
    batch = torch.randn(6, 16, width), torch.randn(6, 16, width)
    return Job(lambda: Net(width, layers), nn.MSELoss(), "adamw", batch, **options)


class Trained:
    """A job under choices, trained for some steps."""

    def __init__(self, choices: Choices, given: Job) -> None:
        self.given = given
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.applied = Applied(choices, given, self.model, self.optimizer, device_type="cpu")
        self.losses: list[Tensor] = []

    def run(self, steps: int = 3) -> None:
        for _ in range(steps):
            loss = train_step(self.applied.stage, self.given.batch)
            assert loss is not None
            self.losses.append(loss)

    def results(self) -> list[Tensor]:
        """Losses, weights and state, after all is undone."""
        self.applied.stage.settle()
        self.applied.undo()
        parameters = list(self.model.parameters())
        state = [self.optimizer.state[p][name] for p in parameters for name in STATE]
        return [*self.losses, *(p.detach() for p in parameters), *state]


def trained(choices: Choices, given: Job) -> list[Tensor]:
    training = Trained(choices, given)
    training.run()
    return training.results()


MASTERS: dict[str, Any] = {"weights": "bf16 with fp32 masters", "precision": "bf16-mixed"}


@pytest.mark.parametrize("clip", [None, 0.5], ids=["no clipping", "clipping"])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"micro_batch": 3, "gradient_room": 0},
        {"blocks": dict.fromkeys(PATHS, "recompute")},
        {"blocks": dict.fromkeys(PATHS, "recompute, offloaded")},
        {"blocks": dict.fromkeys(PATHS, "keep, offloaded"), "micro_batch": 3},
        {"weights_away": PATHS[1:3], "techniques": on("fused_optimizer")},
        MASTERS,
        {**MASTERS, "blocks": dict.fromkeys(PATHS, "recompute"), "gradient_room": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("on", ["host", "disk"])
def test_numbers_are_those_of_what_stays(
    on: Outside, change: dict[str, Any], clip: float | None
) -> None:
    leaves = dataclasses.replace(AWAY, weights_away_on=on, **change)
    stays = dataclasses.replace(
        leaves,
        blocks=PLAIN.blocks,
        optimizer_on="gpu",
        weights_away=(),
        weights_away_on="host",
        gradient_room=None,
    )
    given = job(clip_norm=clip, precision=leaves.precision)
    torch.testing.assert_close(trained(leaves, given), trained(stays, given), rtol=0, atol=0)


@pytest.mark.parametrize("leaves", [AWAY, COLD], ids=["host", "disk"])
def test_how_blocks_run_can_be_switched_while_their_weights_are_away(leaves: Choices) -> None:
    given = job(clip_norm=0.5)
    training = Trained(leaves, given)
    hows = ["recompute", "keep, offloaded", "recompute, offloaded", "keep"]
    for at, how in enumerate(hows):
        blocks = {**dict.fromkeys(PATHS, how), PATHS[at]: "keep"}
        training.applied.switch(dataclasses.replace(leaves, blocks=blocks))
        training.run(1)
        with own_work():  # whoever looks otherwise is shown its numbers
            assert training.model.blocks[LAYERS - 1].up.weight.isnan().all()  # type: ignore[union-attr, operator]
    plain = Trained(PLAIN, given)
    plain.run(len(hows))
    torch.testing.assert_close(training.results(), plain.results(), rtol=0, atol=0)
    assert not any("forward" in vars(module) for module in training.model.modules())


@pytest.mark.parametrize("leaves", [AWAY, COLD], ids=["host", "disk"])
def test_all_can_be_taken_back_on_the_way(leaves: Choices) -> None:
    given = job(clip_norm=0.5)
    training = Trained(dataclasses.replace(leaves, **MASTERS), given)
    plain = Trained(dataclasses.replace(PLAIN, **MASTERS), given)
    for one in (training, plain):
        one.run(2)
        with one.applied.taken_back():
            assert {p.dtype for p in one.model.parameters()} == {torch.float32}
            assert not any(p.isnan().any() for p in one.model.parameters())
        one.run(2)
    torch.testing.assert_close(training.results(), plain.results(), rtol=0, atol=0)


@pytest.mark.parametrize("masters", [False, True])
def test_what_is_saved_are_masters_or_weights_and_can_be_loaded(masters: bool) -> None:
    change = MASTERS if masters else {}
    given = job(precision="bf16-mixed" if masters else "fp32")
    training = Trained(dataclasses.replace(AWAY, **change), given)
    plain = Trained(dataclasses.replace(PLAIN, **change), given)
    for one in (training, plain):
        one.run()
        one.applied.stage.settle()
    saved, expected = (plain_model_state(one.applied.stage) for one in (training, plain))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)
    assert {value.dtype for value in saved.values()} == {torch.float32}
    zeros = {name: torch.full_like(value, 0.25) for name, value in saved.items()}
    for one in (training, plain):
        with torch.no_grad():
            _load_model(one.applied.stage, zeros)
        one.run()
    torch.testing.assert_close(training.results(), plain.results(), rtol=0, atol=0)


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("leaves", [AWAY, COLD], ids=["host", "disk"])
def test_a_run_is_saved_and_resumed_as_if_nothing_had_been(
    leaves: Choices, masters: bool, tmp_path: Path
) -> None:
    change = MASTERS if masters else {}

    def begin(choices: Choices) -> Run:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        given = dataclasses.replace(
            job(clip_norm=0.5, precision=choices.precision), model=model, optimizer=optimizer
        )
        return apply(plan_with(choices, model, optimizer, given.batch), given)

    runs = [begin(dataclasses.replace(base, **change)) for base in (leaves, PLAIN)]
    batch = job().batch
    losses = [[run.step(batch) for _ in range(2)] for run in runs]
    for at, run in enumerate(runs):
        run.save(tmp_path / str(at))
        assert run.evaluate([batch]).loss == runs[1].evaluate([batch]).loss
        losses[at].append(run.step(batch))
    saved = [load_file(next((tmp_path / str(at)).glob("*/model.safetensors"))) for at in (0, 1)]
    torch.testing.assert_close(*saved, rtol=0, atol=0)
    # Each goes on from the other's checkpoint.
    for at, run in enumerate(runs):
        run.load(tmp_path / str(1 - at))
        losses[at].append(run.step(batch))
        losses[at].append(run.step(batch))
        run.undo()
    assert losses[0] == losses[1]
    weights = [dict(run.model.state_dict()) for run in runs]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


@pytest.mark.parametrize("room", [50_000, 400_000, 1_500_000])
def test_a_full_host_leaves_everything_as_it_was(room: int) -> None:
    """It is full when weights leave, when masters do, or when state is to have room."""
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    link = CountingLink(room=room)
    choices = dataclasses.replace(AWAY, **MASTERS)
    with pytest.raises(MemoryError):
        Applied(choices, job(), model, optimizer, device_type="cpu", link_with=lambda _: link)
    gc.collect()
    assert link.live == {}
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(one is other for one, other in zip(owned, model.parameters(), strict=True))


@pytest.mark.parametrize("slots", [0, 7, 40])
def test_a_full_disk_leaves_everything_as_it_was(
    slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is full when the first weight, another one, or state is to have room."""
    disk = ScarceDisk(monkeypatch, slots)
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    choices = dataclasses.replace(COLD, disk_share=1.0, **MASTERS)
    with pytest.raises(DiskFull):
        Applied(choices, job(), model, optimizer, device_type="cpu", disk=tmp_path)
    assert disk.asked == slots + 1
    assert list(tmp_path.iterdir()) == []
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(one is other for one, other in zip(owned, model.parameters(), strict=True))


class HostApart(InstantLink):
    """A host whose memory is none that PyTorch counts, with copies that hold on to a GPU's."""

    def to_host(self, source: Tensor, target: Tensor, after: Sequence[Copy] = ()) -> Copy:
        super().to_host(source, target)
        return Held(source)

    def to_gpu(self, source: Tensor, target: Tensor, after: Sequence[Copy] = ()) -> Copy:
        super().to_gpu(source, target)
        return Held(target)

    def host_memory(self, nbytes: int) -> Tensor:
        return torch.from_numpy(np.empty(nbytes, dtype=np.uint8))


class Held:
    """As a card's copy: it holds its memory until it is waited for."""

    def __init__(self, *held: Tensor) -> None:
        self._held = held

    def wait(self) -> None:
        self._held = ()

    def finish(self) -> None:
        self._held = ()


@pytest.mark.parametrize("clip", [None, 0.5], ids=["no clipping", "clipping"])
@pytest.mark.parametrize("masters", [False, True])
def test_a_step_takes_no_more_memory_with_weights_on_the_disk(
    masters: bool, clip: float | None, tmp_path: Path
) -> None:
    change = MASTERS if masters else {}

    def peak(base: Choices) -> int:
        choices = dataclasses.replace(base, gradient_room=0, **change)
        given = job(clip_norm=clip, precision=choices.precision)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        applied = Applied(
            choices,
            given,
            model,
            optimizer,
            device_type="cpu",
            link_with=lambda _: HostApart(),
            disk=tmp_path,
        )
        # The first is measured in vain: of memory that is older, only the rest is known.
        step = functools.partial(train_step, applied.stage, given.batch)
        *_, most = (measure_cpu_peak(step) for _ in range(3))
        applied.undo()
        return most

    assert peak(COLD) == peak(AWAY)


# -- choices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaves", [AWAY, COLD], ids=["host", "disk"])
def test_choices_come_back_from_json(leaves: Choices) -> None:
    assert Choices.from_dict(json.loads(json.dumps(leaves.as_dict()))) == leaves
    assert leaves.leaves
    assert leaves.fixed_part.weights_away == PATHS
    assert leaves.fixed_part.weights_away_on == leaves.weights_away_on


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"weights_away": ("a",)}, "need their optimizer there"),
        ({"weights_away": ("a", "a"), "optimizer_on": "host"}, "name each block once"),
        ({"weights_away": (3,), "optimizer_on": "host"}, "not 3"),
        (
            {"weights_away": ("b",), "optimizer_on": "host", "blocks": {"a": "keep"}},
            "b is no block of the plan",
        ),
        ({"weights_away_on": "tape"}, "weights wait on host or disk, not on 'tape'"),
    ],
)
def test_what_is_no_choice_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        Choices(**wrong)


def test_a_value_of_another_kind_is_named() -> None:
    with pytest.raises(BadInput, match="weights_away cannot be"):
        Choices.from_dict({**AWAY.as_dict(), "weights_away": "blocks.0"})


def test_weights_cannot_leave_or_return_by_a_switch() -> None:
    training = Trained(AWAY, job())
    for other in (dataclasses.replace(AWAY, weights_away=PATHS[:2]), COLD):
        with pytest.raises(BadInput, match="cannot be switched"):
            training.applied.switch(other)


# -- rehearsed -------------------------------------------------------------------------------------

H200 = find_gpu("h200")
WIDE, MANY = 1024, 12
BLOCK = 8 * WIDE * WIDE
"""Elements of a block's matrices."""
SLACK = 8 << 20
"""Bytes of biases, inputs and the like."""
ACTIVATIONS = MANY * 5 * 6 * 16 * 4 * WIDE * 4


def rehearsed(
    width: int, layers: int, clip: float | None, *, skips: bool, **change: Any
) -> Timeline:
    paths = tuple(f"blocks.{at}" for at in range(layers))
    blocks = dict.fromkeys(paths, "keep")
    choices = dataclasses.replace(
        AWAY, blocks=blocks, weights_away=paths, gradient_room=0, **change
    )
    given = job(width, layers, clip_norm=clip, precision=choices.precision)
    phases = ("build", "step", "eval")
    clock = Clock.of(H200)
    return rehearse(given, H200, phases, choices=choices, clock=clock, skip_first_step=skips)


@pytest.mark.parametrize("clip", [None, 1.0], ids=["no clipping", "clipping"])
@pytest.mark.parametrize("masters", [False, True])
def test_rehearsed_only_a_few_blocks_are_ever_on_the_card(
    masters: bool, clip: float | None
) -> None:
    change = MASTERS if masters else {}
    timeline = rehearsed(WIDE, MANY, clip, skips=True, **change)
    weight, state = (2, 12) if masters else (4, 8)
    # Of weights, state, masters and gradients each is counted once.
    gradients = MANY * BLOCK * weight if clip is not None else 0
    away = MANY * BLOCK * (weight + state) + gradients
    rest = 20 * WIDE * (WIDE + 20)  # the first layer and biases
    assert away <= timeline.host_bytes <= away + rest + SLACK
    workspaces = sum(b.size for b in timeline.blocks if b.category is Category.WORKSPACE)
    buckets = 10 * (weight + state) // weight * bucket_bytes(MANY * BLOCK * weight)
    most = 2 * BLOCK * weight + buckets + ACTIVATIONS
    assert 2 * BLOCK * weight < _peak(timeline) - workspaces < most
    assert most < MANY * BLOCK * 8 / 2


@pytest.mark.parametrize("masters", [False, True])
def test_rehearsed_state_that_is_only_made_takes_what_a_first_step_would(masters: bool) -> None:
    change = MASTERS if masters else {}
    made, stepped = (rehearsed(WIDTH, 3, 1.0, skips=skips, **change) for skips in (True, False))
    assert made.host_bytes == stepped.host_bytes
    assert _peak(made) == _peak(stepped)


def test_a_plan_says_what_leaves_and_what_that_is_worth() -> None:
    given, clock = job(), Clock.of(H200)
    timeline = rehearse(given, H200, choices=AWAY, clock=clock)
    found = describe_changes(given, H200, clock, PLAIN, AWAY, timeline)
    said = {change.technique: (change.before, change.after) for change in found}
    assert said == {
        "optimizer": ("on the GPU", "state on the host"),
        "weights of blocks": ("on the GPU", "4 of 4 on the host"),
    }
    assert all(change.fidelity is Fidelity.EXACT for change in found)


def _peak(timeline: Timeline) -> int:
    """The most bytes that were alive at once."""
    alive = most = 0
    for _, block, is_birth in timeline.stream_of_events():
        alive += block.size if is_birth else -block.size
        most = max(most, alive)
    return most
