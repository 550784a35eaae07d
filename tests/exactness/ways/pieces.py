"""Small models in double precision, batches and optimizers that many ways are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .training import Training

WIDTH, WORDS, BLOCKS = 8, 24, 2
#: Of five batches. The first is the largest, for which is planned; parts do not divide the others.
SIZES = (6, 5, 1, 4, 3)
LENGTHS = (9, 7, 9, 4, 6)


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + hidden


class Rows(nn.Module):
    """From rows to rows, through blocks of any kind."""

    def __init__(
        self,
        make_block: Callable[[], nn.Module] = Block,
        *,
        inputs: int = WIDTH,
        outputs: int = WIDTH,
    ) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, WIDTH)
        self.blocks = nn.ModuleList(make_block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, outputs)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x))  # type: ignore[no-any-return]

    def hidden(self, x: Tensor) -> Tensor:
        """What the last block gives."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Tokens(nn.Module):
    """A language model that sees all words at once."""

    def __init__(self, make_block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(make_block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + x.mean(1, keepdim=True)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def momentum(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    """An optimizer that does not hide a gradient's scale, as Adam's would."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr, momentum=0.9)


def regression(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    loss: Any = None,
    batches: Sequence[Any] = (),
    **options: Any,
) -> Training:
    """Rows that are to come near to others."""
    return Training(
        model=model,
        loss=loss or nn.MSELoss(),
        optimizer=optimizer or momentum(model),
        batches=batches or rows(),
        options=options,
    )


def seeded(seed: int) -> torch.Generator:
    """A stream of its own."""
    return torch.Generator().manual_seed(seed)


def numbers(*shape: int, seed: int) -> Tensor:
    """Normal numbers in double precision."""
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def whole(below: int, *shape: int, seed: int) -> Tensor:
    """Whole numbers from 0 on."""
    return torch.randint(below, shape, generator=seeded(seed))


def rows(sizes: Sequence[int] = SIZES, outputs: int = WIDTH) -> list[tuple[Tensor, Tensor]]:
    """Batches of rows, and of rows to come near to."""
    return [
        (numbers(size, WIDTH, seed=at), numbers(size, outputs, seed=at + 10))
        for at, size in enumerate(sizes)
    ]


def classes(
    count: int, sizes: Sequence[int] = SIZES, width: int = WIDTH
) -> list[tuple[Tensor, Tensor]]:
    """Batches of rows, and of their classes."""
    return [
        (numbers(size, width, seed=at), whole(count, size, seed=at + 10))
        for at, size in enumerate(sizes)
    ]


def texts(sizes: Sequence[int] = SIZES, lengths: Sequence[int] = LENGTHS) -> list[dict[str, Any]]:
    """Batches of texts whose mask leaves ever more of each out; the first batch is full."""
    return [
        _text(at, size, length)
        for at, (size, length) in enumerate(zip(sizes, lengths, strict=True))
    ]


def _text(at: int, size: int, length: int) -> dict[str, Any]:
    ids = whole(WORDS, size, length, seed=at)
    valid = torch.ones(size, length, dtype=torch.bool)
    for row in range(size if at else 0):
        valid[row, 2 + row * (length - 2) // size :] = False
    return {"ids": ids, "mask": valid, "labels": ids.masked_fill(~valid, -100)}
