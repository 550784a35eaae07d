"""Pieces that trainings are put together from: blocks, losses, optimizers, hooks, batches.

What a combination of them leaves out or gets twice, no single way to write a training would show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from ways.pieces import BLOCKS, WIDTH, Block, numbers, seeded
from ways.training import Training

Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


class _Gated(nn.Module):
    """Takes keywords, gives a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.inner(x) + scale * torch.sigmoid(self.gate(x)) * x  # type: ignore[no-any-return]


class _InPlace(Block):
    """Writes to its result."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mul_(0.9).clamp_(-5, 5)


class _Twice(Block):
    """Uses its weights twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x) * 0.5)


class _Following(Block):
    """Follows the mean of what comes by."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.2)
        return super().forward(x - self.mean)


class _Counting(Block):
    """Counts its calls and goes by them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x * (1 + 0.1 * (self.calls % 3)))


def _no_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GroupNorm(2, WIDTH), nn.GELU())


KINDS: dict[str, Callable[[], nn.Module]] = {
    "plain": Block,
    "gated": _Gated,
    "in place": _InPlace,
    "twice": _Twice,
    "following": _Following,
    "counting": _Counting,
    "no norm": _no_norm,
    "group norm": _normed,
}


class _Model(nn.Module):
    def __init__(self, make_block: Callable[[], nn.Module], shared: bool, frozen: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make_block() for _ in range(BLOCKS))
        if shared:
            self.blocks[1] = self.blocks[0]
        self.head = nn.Linear(WIDTH, WIDTH)
        self.double()
        self.first.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def _each(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square()


def _classes(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["label"], label_smoothing=0.1)


def _weighted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (_each(model, batch).mean(1) * batch["weight"]).sum() / batch["weight"].sum()


def _over_the_batch(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return _each(model, batch).mean().sqrt()


#: What a loss may be a sum of.
TERMS: dict[str, Loss] = {
    "mean": lambda model, batch: _each(model, batch).mean(),
    "sum": lambda model, batch: 0.05 * _each(model, batch).sum(),
    "by its size": lambda model, batch: _each(model, batch).sum() / len(batch["x"]),
    "classes": _classes,
    "weighted": _weighted,
    "masked": lambda model, batch: _each(model, batch)[batch["weight"] > 0.5].sum() / WIDTH,
    "over the batch": _over_the_batch,
    "absolute": lambda model, batch: F.smooth_l1_loss(model(batch["x"]), batch["y"]),
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, 0.9, dampening=0.2, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, 0.05, 0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-3),
    "amsgrad": lambda p: torch.optim.Adam(p, 1e-2, eps=1e-3, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, eps=1e-3, momentum=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2, eps=1e-3),
}


def _clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))


def _scale(model: nn.Module) -> None:
    model.get_submodule("first").register_forward_hook(lambda _, __, out: out * 0.9)


def _after(model: nn.Module) -> None:
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    for parameter in model.get_submodule("head").parameters():
        parameter.register_post_accumulate_grad_hook(halve)


HOOKS: dict[str, Callable[[nn.Module], None]] = {
    "none": lambda model: None,
    "clamp": _clamp,
    "forward": _scale,
    "accumulated": _after,
}


@dataclass(frozen=True, kw_only=True)
class Composed:
    """Which pieces a training is made of, by their names."""

    block: str
    shared: bool
    frozen: bool
    terms: tuple[str, ...]
    optimizer: str
    groups: bool
    scheduled: bool
    hook: str
    sizes: tuple[int, ...]
    clip_norm: float | None

    def make(self) -> Training:
        """The training."""
        model = _Model(KINDS[self.block], self.shared, self.frozen)
        HOOKS[self.hook](model)
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": trained[::2]}, {"params": trained[1::2], "lr": 0.01}]
        optimizer = OPTIMIZERS[self.optimizer](groups if self.groups else trained)
        training = Training(
            model=model,
            loss=self._loss,
            optimizer=optimizer,
            batches=[_batch(at, size) for at, size in enumerate(self.sizes)],
            options={"clip_norm": self.clip_norm},
        )
        if self.scheduled:
            training.after_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7).step
        return training

    def _loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        terms = [TERMS[name](model, batch) for name in self.terms]
        return sum(terms[1:], terms[0])


def _batch(at: int, size: int) -> dict[str, Tensor]:
    weight = torch.rand(size, generator=seeded(at + 20), dtype=torch.float64)
    return {
        "x": numbers(size, WIDTH, seed=at),
        "y": numbers(size, WIDTH, seed=at + 10),
        "weight": weight + 0.01,
        "label": torch.randint(WIDTH, (size,), generator=seeded(at + 30)),
    }
