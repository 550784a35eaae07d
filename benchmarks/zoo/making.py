"""What the hand-written trainings of the zoo are made with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.courses import Training
from benchmarks.zoo.batches import shapes

Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One batch in the making: how large it is, and numbers to fill it with."""

    at: int
    """Which of the batches it is; the first one is the largest, and has no padding."""
    size: int
    length: int
    stream: torch.Generator

    def normal(self, *sizes: int) -> Tensor:
        """Numbers around zero."""
        return torch.randn(sizes, generator=self.stream)

    def uniform(self, *sizes: int) -> Tensor:
        """Numbers between zero and one."""
        return torch.rand(sizes, generator=self.stream)

    def whole(self, most: int, *sizes: int, least: int = 0) -> Tensor:
        """Whole numbers below `most`."""
        return torch.randint(least, most, sizes, generator=self.stream)

    def lengths(self) -> Tensor:
        """A length for each sample, falling; all are the same in the first batch."""
        falling = [self.length - row * self.length // (2 * self.size) for row in range(self.size)]
        return torch.tensor([self.length] * self.size if self.at == 0 else falling)

    def mask(self) -> Tensor:
        """Which steps of each sample count."""
        return torch.arange(self.length) < self.lengths()[:, None]


def each(make: Callable[[Drawn], Any], times: int = 4) -> list[Any]:
    """Batches of several sizes and lengths, with so many times the usual samples."""
    return [
        make(Drawn(at=at, size=size * times, length=length, stream=stream))
        for at, (size, length, stream) in enumerate(shapes())
    ]


def training(
    model: nn.Module,
    loss: Loss | nn.Module | None,
    batches: Sequence[Any],
    steps: str = "sgd",
    **options: Any,
) -> Training:
    """A training with SGD and momentum, or with one of the other usual optimizers."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer
    if steps == "sgd":
        optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9)
    elif steps == "adam":
        optimizer = torch.optim.Adam(trained, lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.1)
    return Training(model=model, loss=loss, optimizer=optimizer, batches=batches, options=options)


class Residual(nn.Module):
    """The block that most people write first: a norm, two linear layers and a sum."""

    def __init__(self, width: int, wider: int = 2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, wider * width)
        self.down = nn.Linear(wider * width, width)

    def forward(self, x: Tensor) -> Any:
        """The same shape."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


def perceptron(*widths: int, between: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with something between them."""
    layers: list[nn.Module] = []
    for one, other in itertools.pairwise(widths):
        layers += [nn.Linear(one, other), between()]
    return nn.Sequential(*layers[:-1])
