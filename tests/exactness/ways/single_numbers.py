"""Tensors with a single number, which blocks own, are given and save."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .pieces import Block, Tokens, momentum, texts
from .training import Training, way


class Scaled(Block):
    """Its scale is learned, its temperature is a buffer, its gain comes from outside."""

    temperature: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("temperature", torch.tensor(1.5))

    def forward(self, x: Tensor, gain: Tensor) -> Tensor:
        """A residual block, turned up and down."""
        change = super().forward(x) - x
        return x + change * (self.scale.sigmoid() * gain / self.temperature)


class Gained(Tokens):
    """Gives each block the same gain."""

    def __init__(self) -> None:
        super().__init__(Scaled)
        self.gain = nn.Parameter(torch.tensor(0.1, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        """From words to logits."""
        x = self.embed(ids)
        gain = self.gain.exp()
        for block in self.blocks:
            x = block(x, gain)
        logits: Tensor = self.head(x)
        return logits


@way()
def single_numbers_of_blocks() -> Training:
    """Whatever a technique does with them is no call of the loss."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        each = F.cross_entropy(model(batch["ids"]).mT, batch["ids"], reduction="none")
        mask = batch["mask"].double()
        return (each * mask).sum() / mask.sum()

    model = Gained()
    return Training(model=model, loss=loss, optimizer=momentum(model), batches=texts())
