"""Models and losses as people write them by hand."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.courses import Training
from benchmarks.zoo import batches as made
from benchmarks.zoo.entries import entry


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Steps of SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


@entry()
def multilayer_perceptron() -> Training:
    """Images with a class each."""
    layers = [nn.Flatten(), nn.Linear(3 * 32 * 32, 64)]
    for _ in range(4):
        layers += [nn.ReLU(), nn.Linear(64, 64)]
    model = nn.Sequential(*layers, nn.Linear(64, 5))
    return Training(
        model=model, loss=nn.CrossEntropyLoss(), optimizer=sgd(model), batches=made.pictures()
    )
