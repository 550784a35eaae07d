"""Which of the optimizers with a `zero_grad` of their own drop all gradients."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from oomph.techniques.zero_grad import why_gradients_stay


class Counting(torch.optim.SGD):
    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 1
        super().zero_grad(set_to_none)


class InPlace(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.grad.zero_()


class Around(torch.optim.Optimizer):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class Decaying(torch.optim.SGD):
    """Momentum that is kept in the gradients."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.grad.mul_(0.9)


class OnlySome(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups[1:]:
            for weight in group["params"]:
                weight.grad = None


class Locked(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        with self.lock:  # type: ignore[attr-defined]
            super().zero_grad(set_to_none)


def weights() -> list[nn.Parameter]:
    found = list(nn.Linear(4, 4).parameters())
    for weight in found:
        weight.grad = torch.full_like(weight, 3.0)
    return found


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        lambda own: Counting(own, 0.1),
        lambda own: InPlace(own, 0.1),
        lambda own: Around(torch.optim.Adam(own)),
    ],
)
def test_what_drops_all_gradients_is_fine_and_is_not_called(make: Any) -> None:
    own = weights()
    optimizer = make(own)
    assert why_gradients_stay(optimizer) == ""
    assert all(weight.grad is not None and weight.grad.eq(3).all() for weight in own)
    assert getattr(optimizer, "calls", 0) == 0


@pytest.mark.parametrize("kind", [Decaying, OnlySome])
def test_what_keeps_some_is_named(kind: Any) -> None:
    own = weights()
    why = why_gradients_stay(kind(own, 0.1))
    assert why == f"{kind.__name__}.zero_grad leaves something of the gradients"
    assert all(weight.grad is not None and weight.grad.eq(3).all() for weight in own)


def test_what_cannot_be_tried_is_said() -> None:
    locked = Locked(weights(), 0.1)
    locked.lock = threading.Lock()  # type: ignore[attr-defined]
    assert why_gradients_stay(locked).startswith("Locked has a zero_grad that cannot be tried (")
    replaced = torch.optim.SGD(weights(), 0.1)
    replaced.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
    assert why_gradients_stay(replaced) == "the optimizer's zero_grad was replaced"
