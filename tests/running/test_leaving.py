"""Choices that leave the device: the same numbers, and everything is back after undo."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oomph.errors import BadInput, HostMemoryFull
from oomph.gpus import find_gpu
from oomph.job import Job
from oomph.planning.choices import Choices
from oomph.planning.planner import plan
from oomph.rehearsal.phases import rehearse
from oomph.rehearsal.timeline import Category
from oomph.running.applying import apply_choices
from oomph.running.run import apply
from oomph.running.step import train_step
from oomph.timing.clock import Clock

WIDTH = 64
STATE = ("step", "exp_avg", "exp_avg_sq")


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
    ],
    ids=str,
)
@pytest.mark.parametrize("clip", [None, 0.5], ids=["no clipping", "clipping"])
def test_numbers_are_those_of_what_stays(change: dict[str, Any], clip: float | None) -> None:
    given = job(clip_norm=clip)
    leaves = dataclasses.replace(PLAIN, **change)
    stays = dataclasses.replace(PLAIN, micro_batch=leaves.micro_batch)
    torch.testing.assert_close(trained(leaves, given), trained(stays, given), rtol=0, atol=0)


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
        {"optimizer_on": "host", "low_bit_state": True},
        {"optimizer_on": "host", "cuda_graph": True},
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
