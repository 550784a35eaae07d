"""Rules for what each op of PyTorch does with the samples of a batch.

A rule gets the op with the flows of its arguments (`flow.py`) and returns the flow of its results,
or raises `MixesSamples`. There is a rule for each kind of op. An op without a rule keeps the batch
whole, unless all its arguments are the same for every part.
"""

from __future__ import annotations

import torch

from oomph.splitting.call import Call
from oomph.splitting.rules import (
    along,
    creation,
    derivatives,
    indexing,
    losses,
    per_sample,
    products,
    reductions,
    views,
)
from oomph.splitting.rules.elementwise import elementwise
from oomph.splitting.rules.registry import OPS, RULES, Rule

__all__ = [
    "OPS",
    "along",
    "creation",
    "derivatives",
    "find_rule",
    "indexing",
    "losses",
    "per_sample",
    "products",
    "reductions",
    "views",
]


def find_rule(call: Call) -> Rule | None:
    """The rule of an op; None if it has none."""
    if call.base in RULES:
        return RULES[call.base]
    if torch.Tag.pointwise in call.step.func.tags or call.base in OPS["elementwise"]:
        return elementwise
    return None
