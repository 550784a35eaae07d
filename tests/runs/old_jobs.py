"""The job that the files in `tests/fixtures` were made with; it must stay as it is."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]
CLASSES, WIDTH = 16, 8


class Net(nn.Module):
    """Two blocks, a convolution before them and a head behind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.mix = nn.Conv2d(1, 1, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits by position."""
        x = self.embed(ids)
        x = x + self.mix(x[:, None])[:, 0]
        for block in self.blocks:
            x = x + block(x).tanh()
        logits: Tensor = self.head(x)
        return logits


def build() -> nn.Module:
    """The same weights each time."""
    torch.manual_seed(0)
    return Net()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def make_batch(seed: int) -> Batch:
    ids = torch.randint(CLASSES, (4, 6), generator=torch.Generator().manual_seed(seed))
    return ids, ids.roll(1, 1)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
