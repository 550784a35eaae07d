"""Small models whose precision adapts, on the CPU."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn

from oomph.jobs.description import describe_job
from oomph.jobs.job import Job
from oomph.plans.plan import Plan
from oomph.runs.run import Run, apply
from oomph.search.planner import plan as make_plan

WIDTH, CLASSES, SAMPLES = 16, 8, 32

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Two products and a residual."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.up(x).tanh()))


class Net(nn.Module):
    """Three blocks and a head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def batches(count: int, samples: int = SAMPLES) -> list[Batch]:
    """Always the same ones."""
    numbers = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(samples, WIDTH, generator=numbers),
            torch.randint(0, CLASSES, (samples,), generator=numbers),
        )
        for _ in range(count)
    ]


@functools.cache
def _some_plan() -> Plan:
    job = Job(Net(), nn.CrossEntropyLoss(), "adamw", batches(1)[0])
    return make_plan(job, budget="1GiB")


def start(model: nn.Module, batch: Any = None, **choices: Any) -> Run:
    """A run of this model under a plan with these choices."""
    batch = batches(1)[0] if batch is None else batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    base = _some_plan()
    plan = dataclasses.replace(
        base,
        made_for=describe_job("net", model, batch, optimizer, None),
        choices=dataclasses.replace(base.choices, **{"blocks": {}, **choices}),
    )
    job = Job(model, nn.CrossEntropyLoss(), optimizer, batch)
    return apply(plan, job)
