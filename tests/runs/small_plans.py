"""Plans as if the planner had made them, for tests that want one choice and no search."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from oomph.jobs.description import describe_job
from oomph.plans.choices import Choices
from oomph.plans.fidelity import Fidelity
from oomph.plans.ledgers import Ledgers
from oomph.plans.plan import Plan, Predicted


def plan_with(
    choices: Choices, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any
) -> Plan:
    """A plan for this model and batch on the CPU; what it predicts means nothing."""
    return Plan(
        made_for=describe_job("net", model, batch, optimizer, None),
        budget=1 << 20,
        choices=choices,
        predicted=Predicted(
            peak=Ledgers(allocated=900_000, reserved=900_000, device=900_000),
            high=1_000_000,
            categories_at_peak={"parameter": 500_000},
            seconds=0.5,
            unlimited_seconds=0.4,
            samples=4,
            tokens=24,
        ),
        fidelity=Fidelity.EXACT,
        gap=0.0,
        changes=(),
        notes=(),
        planning_seconds=0.1,
    )
