"""Batches that are no plain tensors with samples first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.courses import Training
from benchmarks.zoo.contrastive import encoder
from benchmarks.zoo.entries import entry
from benchmarks.zoo.losses import Sequence
from benchmarks.zoo.making import Drawn, Residual, each, training

WIDTH = 24


class Sample(NamedTuple):
    """A batch as a named tuple."""

    x: Tensor
    y: Tensor


@dataclass
class Batch:
    """A batch as a dataclass, which PyTorch's trees do not look into."""

    x: Tensor
    y: Tensor
    names: list[str]


def _classes(model: Any, x: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(model(x), y)


@entry()
def named_tuple() -> Training:
    """Fields by name."""
    return training(
        encoder(outputs=5),
        lambda m, b: _classes(m, b.x, b.y),
        each(lambda d: Sample(d.normal(d.size, 16), d.whole(5, d.size)), 16),
    )


@entry()
def data_class() -> Training:
    """A dataclass, with names of samples."""

    def batch(drawn: Drawn) -> Batch:
        names = [f"sample {at}" for at in range(drawn.size)]
        return Batch(drawn.normal(drawn.size, 16), drawn.whole(5, drawn.size), names)

    return training(encoder(outputs=5), lambda m, b: _classes(m, b.x, b.y), each(batch, 16))


@entry()
def nested_dictionaries() -> Training:
    """Dictionaries in tuples in dictionaries, with texts, numbers and None."""

    def batch(drawn: Drawn) -> dict[str, Any]:
        return {
            "inputs": ({"x": drawn.normal(drawn.size, 16), "mask": None}, "images"),
            "meta": {"epoch": drawn.at, "names": [f"{at}.png" for at in range(drawn.size)]},
            "targets": [drawn.whole(5, drawn.size), drawn.normal(drawn.size)],
        }

    def loss(model: Any, b: Any) -> Any:
        out = model(b["inputs"][0]["x"])
        return F.cross_entropy(out[:, :5], b["targets"][0]) + F.mse_loss(out[:, 5], b["targets"][1])

    return training(encoder(outputs=6), loss, each(batch, 16))


@entry()
def lengths_as_python_numbers() -> Training:
    """A list of lengths, one for each sample, that a loop goes by."""

    def batch(drawn: Drawn) -> dict[str, Any]:
        return {
            "x": drawn.normal(drawn.size, drawn.length, 12),
            "y": drawn.normal(drawn.size, drawn.length),
            "lengths": drawn.lengths().tolist(),
        }

    def loss(model: Any, b: Any) -> Any:
        out = model(b["x"]).squeeze(-1)
        total = out.new_zeros(())
        for row, n in enumerate(b["lengths"]):
            total = total + (out[row, :n] - b["y"][row, :n]).pow(2).sum()
        return total / sum(b["lengths"])

    return training(Sequence(1), loss, each(batch, 1))


@entry()
def count_as_a_python_number() -> Training:
    """How many steps are valid is a number beside the tensors."""

    def batch(drawn: Drawn) -> dict[str, Any]:
        mask = drawn.mask()
        return {
            "x": drawn.normal(drawn.size, drawn.length, 12),
            "y": drawn.normal(drawn.size, drawn.length),
            "mask": mask,
            "valid": int(mask.sum()),
        }

    def loss(model: Any, b: Any) -> Any:
        off = (model(b["x"]).squeeze(-1) - b["y"]).abs()
        return (off * b["mask"]).sum() / b["valid"]

    return training(Sequence(1), loss, each(batch))


@entry()
def count_as_a_tensor_of_one() -> Training:
    """`num_items_in_batch`, as a tensor of one element."""

    def batch(drawn: Drawn) -> dict[str, Any]:
        labels = drawn.whole(6, drawn.size, drawn.length).masked_fill(~drawn.mask(), -100)
        return {
            "x": drawn.normal(drawn.size, drawn.length, 12),
            "labels": labels,
            "num_items_in_batch": (labels != -100).sum().reshape(1),
        }

    def loss(model: Any, b: Any) -> Any:
        out = model(b["x"])
        lost = F.cross_entropy(out.view(-1, 6), b["labels"].view(-1), reduction="sum")
        return (lost / b["num_items_in_batch"]).squeeze()

    return training(Sequence(), loss, each(batch))


@entry()
def samples_second() -> Training:
    """(T, B, F) and (T, B): no tensor has samples first."""

    def loss(model: Any, b: Any) -> Any:
        return F.mse_loss(model(b[0]).squeeze(-1), b[1])

    return training(
        Sequence(1),
        loss,
        each(lambda d: (d.normal(d.length, d.size, 12), d.normal(d.length, d.size))),
    )


@entry()
def samples_second_with_a_mean_of_times() -> Training:
    """(T, B, F), averaged over times by a softmax along the first dimension."""

    def loss(model: Any, b: Any) -> Any:
        out = model(b["x"])
        weight = out[..., :1].softmax(0)
        return F.cross_entropy((out * weight).sum(0), b["y"])

    def batch(drawn: Drawn) -> dict[str, Tensor]:
        return {"x": drawn.normal(drawn.length, drawn.size, 12), "y": drawn.whole(6, drawn.size)}

    return training(Sequence(), loss, each(batch))


@entry()
def two_sizes_of_samples() -> Training:
    """Labelled and unlabelled samples, of which there are twice as many."""

    def loss(model: Any, b: Any) -> Any:
        supervised = F.cross_entropy(model(b["x"]), b["y"])
        one, other = model(b["u"]), model(b["u2"])
        return supervised + F.mse_loss(one.softmax(1), other.softmax(1).detach())

    def batch(drawn: Drawn) -> dict[str, Tensor]:
        n = drawn.size
        return {
            "x": drawn.normal(n, 16),
            "y": drawn.whole(5, n),
            "u": drawn.normal(2 * n, 16),
            "u2": drawn.normal(2 * n, 16),
        }

    return training(encoder(outputs=5), loss, each(batch, 12))


@entry()
def views_of_each_sample() -> Training:
    """(B, V, F): views are put beside samples, and their mean taken afterwards."""

    def loss(model: Any, b: Any) -> Any:
        x, y = b
        n, views = x.shape[:2]
        out = model(x.view(n * views, -1)).view(n, views, -1)
        return F.cross_entropy(out.mean(1), y) + 0.1 * out.var(1).mean()

    return training(
        encoder(outputs=5), loss, each(lambda d: (d.normal(d.size, 3, 16), d.whole(5, d.size)), 8)
    )


@entry()
def views_before_samples() -> Training:
    """(V, B, F), flattened: rows of one sample are far apart."""

    def loss(model: Any, b: Any) -> Any:
        x, y = b
        views, n = x.shape[:2]
        out = model(x.reshape(views * n, -1)).view(views, n, -1).mean(0)
        return F.cross_entropy(out, y)

    return training(
        encoder(outputs=5), loss, each(lambda d: (d.normal(3, d.size, 16), d.whole(5, d.size)), 8)
    )


@entry()
def pairs_that_lie_behind_each_other() -> Training:
    """Even rows are one view, odd rows the other."""

    def loss(model: Any, x: Any) -> Any:
        z = F.normalize(model(x), dim=1)
        return (1 - (z[0::2] * z[1::2]).sum(1)).mean()

    return training(encoder(), loss, each(lambda d: d.normal(2 * d.size, 16), 8))


@entry()
def words_and_characters() -> Training:
    """Whole numbers of two kinds, embedded and joined; a bag of characters for each word."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.letters = nn.Embedding(40, 12), nn.Embedding(20, 12, padding_idx=0)
            self.blocks = nn.ModuleList([Residual(WIDTH) for _ in range(4)])
            self.out = nn.Linear(WIDTH, 5)

        def forward(self, words: Tensor, letters: Tensor) -> Any:
            of_letters = self.letters(letters).max(2)[0]
            x = torch.cat([self.words(words), of_letters], -1)
            for block in self.blocks:
                x = block(x)
            return self.out(x)

    def batch(drawn: Drawn) -> dict[str, Tensor]:
        shape = drawn.size, drawn.length
        return {
            "words": drawn.whole(40, *shape),
            "letters": drawn.whole(20, *shape, 5),
            "tags": drawn.whole(5, *shape).masked_fill(~drawn.mask(), -1),
        }

    def loss(model: Any, b: Any) -> Any:
        out = model(b["words"], b["letters"])
        lost = F.cross_entropy(out.permute(0, 2, 1), b["tags"], ignore_index=-1, reduction="none")
        return (lost.sum(1) / (b["tags"] != -1).sum(1)).mean()

    return training(Joined(), loss, each(batch))
