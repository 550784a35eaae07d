"""Whether an optimizer's `zero_grad` drops all gradients, as a run does at the end of each step.

A class may keep a part of them, as momentum that its owner keeps in the gradients. So `zero_grad`
of such a class is tried on a copy of the optimizer whose tensors have one element each.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from oomph.techniques.python_state import PythonState

_NAME = "zero_grad"


def why_gradients_stay(optimizer: torch.optim.Optimizer) -> str:
    """Why `zero_grad` may not drop all gradients, as text; empty if it does."""
    if _NAME in vars(optimizer):
        return "the optimizer's zero_grad was replaced"
    kind = type(optimizer)
    if kind.zero_grad is torch.optim.Optimizer.zero_grad:
        return ""
    try:
        twin = _small_copy(optimizer)
        twin.zero_grad()
    except Exception as error:
        return f"{kind.__name__} has a zero_grad that cannot be tried ({error})"
    gradients = [weight.grad for group in twin.param_groups for weight in group["params"]]
    if any(gradient is not None and bool(gradient.any()) for gradient in gradients):
        return f"{kind.__name__}.zero_grad leaves something of the gradients"
    return ""


def _small_copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy with all that its class added, whose tensors have one element, and gradients of 1."""
    memo: dict[int, Any] = {
        id(tensor): _like(tensor) for _, tensor in PythonState([("", optimizer)]).tensors
    }
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        vars(twin)[name] = copy.deepcopy(value, memo)
    return twin


def _like(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return torch.ones(1, device="cpu")
    weight = nn.Parameter(torch.ones(1, device="cpu"), requires_grad=tensor.requires_grad)
    weight.grad = torch.ones(1, device="cpu")
    return weight
