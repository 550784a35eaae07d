"""What is added to an optimizer's step is known, wherever it was added."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from oomph.errors import BadInput
from oomph.techniques.low_bit_state import low_bit_state
from oomph.techniques.optimizer_steps import PER_PARAMETER, runs_step_of, why_not_divided

Make = Callable[[], torch.optim.Optimizer]


def adamw(cls: type[torch.optim.Optimizer] = torch.optim.AdamW) -> torch.optim.Optimizer:
    return cls([nn.Parameter(torch.ones(2, 2))], lr=0.1)


class Renamed(torch.optim.AdamW):
    """Nothing but a name."""


class Counting(torch.optim.AdamW):
    @functools.wraps(torch.optim.AdamW.step)
    def step(self, *args: Any, **kwargs: Any) -> Any:
        return super().step(*args, **kwargs)


class Choosy(torch.optim.AdamW):
    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        return super()._init_group(*args, **kwargs)


class Lookahead(torch.optim.Optimizer):
    """Holds another optimizer and shares its groups."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def scheduled(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return optimizer


def replaced(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    plain = optimizer.step

    @functools.wraps(plain)
    def step(_: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    return optimizer


def low_bit(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    low_bit_state(optimizer)
    return optimizer


@pytest.mark.parametrize("cls", PER_PARAMETER, ids=lambda cls: cls.__name__)
def test_pytorchs_own_steps_are_divided(cls: type[torch.optim.Optimizer]) -> None:
    assert why_not_divided(adamw(cls)) == ""


@pytest.mark.parametrize(
    "make",
    [
        lambda: adamw(Renamed),
        lambda: scheduled(adamw()),
        lambda: scheduled(scheduled(adamw(Renamed))),
        lambda: low_bit(adamw()),
        lambda: scheduled(low_bit(adamw())),
        lambda: low_bit(scheduled(adamw())),
    ],
    ids=["subclass", "scheduler", "two schedulers", "8-bit", "8-bit inside", "8-bit outside"],
)
def test_what_only_steps_is_divided(make: Make) -> None:
    assert why_not_divided(make()) == ""


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: adamw(Counting), "whether Counting steps each parameter by itself"),
        (lambda: adamw(Choosy), "whether Choosy steps each parameter by itself"),
        (lambda: Lookahead(adamw()), "whether Lookahead steps each parameter by itself"),
        (lambda: replaced(adamw()), "replaced optimizer.step by Adam.step .*test_optimizer_steps"),
        (lambda: scheduled(replaced(adamw())), "replaced optimizer.step"),
        (lambda: replaced(scheduled(adamw())), "replaced optimizer.step"),
        (lambda: replaced(low_bit(adamw())), "replaced optimizer.step"),
    ],
)
def test_what_does_more_is_not_divided_and_named(make: Make, said: str) -> None:
    optimizer = make()  # a scheduler holds it weakly
    assert re.search(said, why_not_divided(optimizer))


@pytest.mark.parametrize("when", ["pre", "post"])
def test_hooks_count_as_long_as_they_are_there(when: str) -> None:
    optimizer = adamw()
    handle = getattr(optimizer, f"register_step_{when}_hook")(lambda *_: None)
    assert "hooks" in why_not_divided(optimizer)
    handle.remove()
    assert why_not_divided(optimizer) == ""


def test_hooks_of_all_optimizers_count() -> None:
    handle = register_optimizer_step_post_hook(lambda *_: None)
    try:
        assert "hooks" in why_not_divided(adamw())
    finally:
        handle.remove()


def test_a_class_whose_step_somebody_replaced_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *a: plain(self, *a))
    assert "AdamW" in why_not_divided(adamw())


def test_a_replaced_step_is_not_passed_by_for_one_in_8_bits() -> None:
    with pytest.raises(BadInput, match=r"replaced optimizer\.step.*8-bit state"):
        low_bit_state(replaced(adamw()))


def test_an_optimizer_is_known_after_something_was_compiled() -> None:
    """Compiling wraps parts of every optimizer, whatever is compiled."""
    torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
    assert not why_not_divided(adamw())
    assert runs_step_of(adamw(), PER_PARAMETER)
