"""Tables and recommendations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.courses import Training
from benchmarks.zoo.contrastive import encoder
from benchmarks.zoo.entries import entry
from benchmarks.zoo.making import Drawn, Residual, each, perceptron, training

FIELDS, VALUES, WIDTH = 6, 40, 8


def _clicks(drawn: Drawn) -> tuple[Tensor, Tensor]:
    return drawn.whole(VALUES, drawn.size, FIELDS), (drawn.uniform(drawn.size) < 0.3).float()


def _clicked(model: nn.Module, steps: str = "adam") -> Training:
    return training(
        model,
        lambda m, b: F.binary_cross_entropy(torch.sigmoid(m(b[0])), b[1]),
        each(_clicks, 24),
        steps,
    )


class Machine(nn.Module):
    """A factorization machine with a deep part."""

    offsets: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offsets", VALUES * torch.arange(FIELDS))
        self.linear = nn.Embedding(FIELDS * VALUES, 1)
        self.embed = nn.Embedding(FIELDS * VALUES, WIDTH)
        self.deep = nn.Sequential(*[Residual(FIELDS * WIDTH, 1) for _ in range(3)])
        self.out = nn.Linear(FIELDS * WIDTH, 1)

    def forward(self, x: Tensor) -> Any:
        """A score for each sample."""
        x = x + self.offsets
        e = self.embed(x)
        pairs = 0.5 * (e.sum(1) ** 2 - (e**2).sum(1)).sum(1, keepdim=True)
        deep = self.out(self.deep(e.flatten(1)))
        return (self.linear(x).sum(1) + pairs + deep).squeeze(1)


@entry()
def factorization_machine() -> Training:
    """DeepFM."""
    return _clicked(Machine())


class Crossed(nn.Module):
    """Crosses of all features, written with matrices of one column."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.ModuleList([nn.Embedding(VALUES, WIDTH) for _ in range(FIELDS)])
        width = FIELDS * WIDTH
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(width, 1)) for _ in range(3)])
        self.deep = nn.Sequential(*[Residual(width, 1) for _ in range(3)])
        self.out = nn.Linear(2 * width, 1)

    def forward(self, x: Tensor) -> Any:
        """A score for each sample."""
        x0 = torch.cat([embed(x[:, at]) for at, embed in enumerate(self.embed)], 1)
        crossed = x0
        for weight in self.weights:
            crossed = x0 * (crossed @ weight) + crossed
        return self.out(torch.cat([crossed, self.deep(x0)], 1)).squeeze(1)


@entry()
def deep_and_cross() -> Training:
    """One table for each field."""
    return _clicked(Crossed(), "sgd")


@entry()
def embedding_bags() -> Training:
    """Baskets of several sizes: one line of items and offsets, as in PyTorch's tutorial."""
    model = nn.ModuleDict(
        {
            "bag": nn.EmbeddingBag(VALUES, WIDTH * 3, mode="mean"),
            "deep": nn.Sequential(*[Residual(WIDTH * 3) for _ in range(4)]),
            "out": nn.Linear(WIDTH * 3, 4),
        }
    )

    def batch(drawn: Drawn) -> dict[str, Tensor]:
        lengths = drawn.lengths() // 4 + 1
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)[:-1]])
        return {
            "items": drawn.whole(VALUES, int(lengths.sum())),
            "offsets": offsets,
            "y": drawn.whole(4, drawn.size),
        }

    def loss(model: Any, b: Any) -> Any:
        bags = model["bag"](b["items"], b["offsets"])
        return F.cross_entropy(model["out"](model["deep"](bags)), b["y"])

    return training(model, loss, each(batch, 16))


@entry()
def embedding_bags_of_one_size() -> Training:
    """Baskets as rows of a table, weighed."""
    model = nn.ModuleDict(
        {
            "bag": nn.EmbeddingBag(VALUES, WIDTH * 3, mode="sum"),
            "deep": nn.Sequential(*[Residual(WIDTH * 3) for _ in range(4)]),
            "out": nn.Linear(WIDTH * 3, 4),
        }
    )

    def loss(model: Any, b: Any) -> Any:
        items, weights, y = b
        bags = model["bag"](items, per_sample_weights=weights)
        return F.cross_entropy(model["out"](model["deep"](bags)), y)

    def batch(drawn: Drawn) -> tuple[Tensor, ...]:
        n = drawn.size
        return drawn.whole(VALUES, n, 7), drawn.uniform(n, 7), drawn.whole(4, n)

    return training(model, loss, each(batch, 16))


@entry()
def sparse_embeddings() -> Training:
    """`sparse=True` and an optimizer that takes it."""
    model = nn.Sequential(nn.Embedding(VALUES, WIDTH, sparse=True), nn.Flatten())
    for _ in range(3):
        model.append(Residual(FIELDS * WIDTH, 1))
    model.append(nn.Linear(FIELDS * WIDTH, 1))
    made = training(
        model,
        lambda m, b: F.binary_cross_entropy_with_logits(m(b[0]).squeeze(1), b[1]),
        each(_clicks, 16),
    )
    made.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return made


class Towers(nn.Module):
    """Users and items."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = encoder(), encoder()


def _pairs(drawn: Drawn) -> dict[str, Tensor]:
    popular = drawn.uniform(drawn.size) + 0.01
    return {
        "user": drawn.normal(drawn.size, 16),
        "item": drawn.normal(drawn.size, 16),
        "popularity": popular / popular.sum(),
    }


@entry()
def two_towers_with_softmax_in_the_batch() -> Training:
    """Items of the batch are each other's negatives, corrected by how popular they are."""

    def loss(model: Any, b: Any) -> Any:
        scores = model.user(b["user"]) @ model.item(b["item"]).T - b["popularity"].log()
        return F.cross_entropy(scores, torch.arange(len(scores)))

    return training(Towers(), loss, each(_pairs, 12))


@entry()
def personalised_ranking() -> Training:
    """BPR: a positive and a negative item for each user, and the norms of what was used."""

    class Factors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = nn.Embedding(20, 16), nn.Embedding(50, 16)

    def loss(model: Any, b: Any) -> Any:
        u, i, j = model.users(b[:, 0]), model.items(b[:, 1]), model.items(b[:, 2])
        ranking = -F.logsigmoid((u * (i - j)).sum(1)).mean()
        norms = (u.norm(2).pow(2) + i.norm(2).pow(2) + j.norm(2).pow(2)) / 2 / len(b)
        return ranking + 1e-3 * norms

    return training(Factors(), loss, each(lambda d: d.whole(20, d.size, 3), 64))


class Sparsemax(nn.Module):
    """A softmax with zeros, by sorting."""

    def forward(self, x: Tensor) -> Any:
        """Rows that sum to one."""
        ordered, _ = torch.sort(x, dim=1, descending=True)
        ranks = torch.arange(1, x.size(1) + 1, dtype=x.dtype)
        sums = ordered.cumsum(1)
        support = (1 + ranks * ordered > sums).sum(1, keepdim=True)
        threshold = (sums.gather(1, support - 1) - 1) / support.to(x.dtype)
        return torch.clamp(x - threshold, min=0)


class TabNet(nn.Module):
    """Steps that each look at some features, and a penalty for looking at many."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm = norm(16)
        self.first = nn.Linear(16, 2 * 16)
        self.attend = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.transform = nn.ModuleList([nn.Linear(16, 2 * 16) for _ in range(3)])
        self.sparsemax = Sparsemax()
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Any:
        """Scores, and how much was looked at."""
        x = self.norm(x)
        prior = torch.ones_like(x)
        seen = F.glu(self.first(x))
        total, decided = x.new_zeros(()), torch.zeros_like(seen)
        for attend, transform in zip(self.attend, self.transform, strict=True):
            mask = self.sparsemax(attend(seen) * prior)
            total = total + torch.mean(torch.sum(-mask * torch.log(mask + 1e-10), dim=1))
            prior = prior * (1.5 - mask)
            seen = F.glu(transform(mask * x))
            decided = decided + F.relu(seen)
        return self.out(decided), total / 3


def _table(drawn: Drawn) -> tuple[Tensor, Tensor]:
    return drawn.normal(drawn.size, 16), drawn.whole(3, drawn.size)


def _tabnet_loss(model: Any, b: Any) -> Any:
    scores, penalty = model(b[0])
    return F.cross_entropy(scores, b[1]) + 1e-3 * penalty


@entry()
def tabnet() -> Training:
    """With batch norm, as published."""
    return training(TabNet(nn.BatchNorm1d), _tabnet_loss, each(_table, 24), "adam")


@entry()
def tabnet_with_layer_norm() -> Training:
    """Without statistics of the batch."""
    return training(TabNet(nn.LayerNorm), _tabnet_loss, each(_table, 24), "adam")


@entry()
def gated_experts_of_tasks() -> Training:
    """MMoE: experts that all tasks share, a gate for each; one task has no label for some."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([encoder(16, 16) for _ in range(3)])
            self.gates = nn.ModuleList([nn.Linear(16, 3) for _ in range(2)])
            self.towers = nn.ModuleList([perceptron(16, 8, 1) for _ in range(2)])

        def forward(self, x: Tensor) -> Any:
            made = torch.stack([expert(x) for expert in self.experts], 1)
            outs = []
            for gate, tower in zip(self.gates, self.towers, strict=True):
                weights = gate(x).softmax(1).unsqueeze(2)
                outs.append(tower((made * weights).sum(1)).squeeze(1))
            return outs

    def loss(model: Any, b: Any) -> Any:
        click, buy = model(b["x"])
        known = ~torch.isnan(b["buy"])
        lost = F.binary_cross_entropy_with_logits(click, b["click"])
        if known.any():
            lost = lost + F.mse_loss(buy[known], b["buy"][known])
        return lost

    def batch(drawn: Drawn) -> dict[str, Tensor]:
        bought = drawn.normal(drawn.size)
        bought[drawn.uniform(drawn.size) < 0.5] = float("nan")
        return {
            "x": drawn.normal(drawn.size, 16),
            "click": (drawn.uniform(drawn.size) < 0.5).float(),
            "buy": bought,
        }

    return training(Shared(), loss, each(batch, 12))
