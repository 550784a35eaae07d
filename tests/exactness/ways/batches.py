"""Batches, by what they are made of and what comes with them."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_map

from .losses import WHOLE
from .pieces import (
    SIZES,
    WIDTH,
    WORDS,
    Rows,
    Tokens,
    classes,
    momentum,
    numbers,
    regression,
    rows,
    texts,
    whole,
)
from .training import Training, way


def _mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


@way()
def nested_batches() -> Training:
    """Tensors in dicts in lists, with None, words and numbers beside them."""
    batches = [
        {"inputs": [x, None], "meta": {"name": f"batch {at}", "at": at}, "target": (y,)}
        for at, (x, y) in enumerate(rows())
    ]

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return _mse(model, batch["inputs"][0], batch["target"][0])

    return regression(Rows(), loss=loss, batches=batches)


_Pair = namedtuple("_Pair", "x y")


@way()
def named_tuples() -> Training:
    """As many loaders give them."""
    batches = [_Pair(x, y) for x, y in rows()]
    return regression(Rows(), loss=lambda m, b: _mse(m, b.x, b.y), batches=batches)


@dataclass(frozen=True, slots=True)
class _Target:
    """Frozen, with slots."""

    y: Tensor
    weight: Tensor


@dataclass
class _Sample:
    """With words, another dataclass, and what is made of them."""

    x: Tensor
    target: _Target
    names: list[str]
    scale: float = 1.0

    @property
    def total(self) -> Tensor:
        """What the weights add up to."""
        return self.target.weight.sum()


@way()
def dataclasses() -> Training:
    """One in another, with names of samples and numbers beside them, and a property."""
    batches = [
        _Sample(
            x,
            _Target(y, whole(5, len(x), seed=at) + 1.0),
            [f"sample {one}" for one in range(len(x))],
            1 + at / 10,
        )
        for at, (x, y) in enumerate(rows())
    ]

    def loss(model: nn.Module, batch: _Sample) -> Tensor:
        assert isinstance(batch, _Sample)
        assert isinstance(batch.target, _Target)
        each = (model(batch.x) - batch.target.y).square().mean(1)
        return batch.scale * (each * batch.target.weight).sum() / batch.total

    return regression(Rows(), loss=loss, batches=batches)


@way()
def a_mapping_of_its_own_kind() -> Training:
    """A tokenizer's kind of mapping, which is no dict, and one inside another."""
    batches = [UserDict(x=[UserDict(rows=x)], y=OrderedDict(rows=y)) for x, y in rows()]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return _mse(model, batch["x"][0]["rows"], batch["y"]["rows"])

    return regression(Rows(), loss=loss, batches=batches)


@way()
def numbers_beside_samples() -> Training:
    """Scalars and tables come with the batch and belong to no sample, one as long as the batch."""
    batches = [
        {"x": x, "y": y, "scale": torch.tensor(0.5 + at), "table": numbers(3, WIDTH, seed=at)}
        for at, (x, y) in enumerate(rows())
    ]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return _mse(model, batch["x"] + batch["table"].sum(0), batch["y"] * batch["scale"])

    return regression(Rows(), loss=loss, batches=batches)


@way()
def strided_and_shared_memory() -> Training:
    """Inputs are views of one memory, turned, expanded and stepped over."""
    batches = []
    for at, size in enumerate(SIZES):
        memory = numbers(2 * WIDTH, 2 * size, seed=at)
        x = memory.T[::2, ::2]
        y = memory[:WIDTH, :1].T.expand(size, WIDTH)
        batches.append((x, y))
    return regression(Rows(), batches=batches)


@way()
def born_in_numpy() -> Training:
    """Tensors that show numpy's memory."""
    batches = [
        (torch.from_numpy(x.numpy()), torch.as_tensor(y.numpy()[::-1].copy())) for x, y in rows()
    ]
    return regression(Rows(), batches=batches)


@way()
def single_samples_and_last_ones() -> Training:
    """Batches of one sample among others, and a last one that is partial."""
    return regression(Rows(), batches=rows(sizes=(6, 1, 2, 1, 5)))


@way()
def masks_that_close() -> Training:
    """The mask of a later batch lets nothing through, and the sum is divided by one then."""
    batches = texts()
    batches[1]["mask"][:] = False
    batches[2]["mask"][:2] = False

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        each = F.cross_entropy(model(batch["ids"]).mT, batch["ids"], reduction="none")
        mask = batch["mask"].double()
        return (each * mask).sum() / mask.sum().clamp(min=1)

    model = Tokens()
    return Training(model=model, loss=loss, optimizer=momentum(model), batches=batches)


@way()
def parts_without_labels() -> Training:
    """All labels of some samples are ignored: a part of the batch may have none."""
    batches = texts()
    for batch in batches[1:]:
        batch["labels"][: len(batch["labels"]) // 2] = -100

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())

    model = Tokens()
    return Training(model=model, loss=loss, optimizer=momentum(model), batches=batches)


@way()
def weights_of_zero() -> Training:
    """Samples that count nothing, and in one batch hardly any that counts."""
    batches = [
        (x, y, (torch.arange(len(x)) % 3 == at % 3).double() + 1e-3)
        for at, (x, y) in enumerate(rows())
    ]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, y, weight = batch
        each = (model(x) - y).square().mean(1)
        return (each * weight / weight.sum()).sum()

    return regression(Rows(), loss=loss, batches=batches)


@way()
def labels_as_floats() -> Training:
    """Classes that come as floating numbers, and are chances for some."""
    batches = [(x, F.one_hot(y, 5).double() * 0.9 + 0.02) for x, y in classes(5)]
    return regression(Rows(outputs=5), loss=nn.CrossEntropyLoss(), batches=batches)


@way()
def lengths_instead_of_masks() -> Training:
    """Each sample's length comes beside it, and the mask is made in the loss."""
    batches = [{"ids": one["ids"], "lengths": one["mask"].sum(1)} for one in texts()]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        each = F.cross_entropy(model(batch["ids"]).mT, batch["ids"], reduction="none")
        mask = torch.arange(each.shape[1])[None] < batch["lengths"][:, None]
        return (each * mask).sum() / batch["lengths"].sum()

    model = Tokens()
    return Training(model=model, loss=loss, optimizer=momentum(model), batches=batches)


@way(refusals=WHOLE)
def packed_sequences() -> Training:
    """Lengths go to the host, and an LSTM runs over what is packed."""

    class Packed(Tokens):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True).double()

        def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
            x = self.embed(ids)
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out, _ = pad_packed_sequence(
                self.lstm(packed)[0], batch_first=True, total_length=ids.shape[1]
            )
            for block in self.blocks:
                out = block(out)
            logits: Tensor = self.head(out)
            return logits

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["ids"], batch["mask"].sum(1))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    model = Packed()
    return Training(model=model, loss=loss, optimizer=momentum(model), batches=texts())


@way(refusals=WHOLE)
def graphs_of_nodes() -> Training:
    """Nodes of several graphs behind each other, with edges: nodes are no samples."""
    batches = []
    for at, size in enumerate((4, 3, 4, 2, 3)):
        nodes = numbers(3 * size, WIDTH, seed=at)
        edges = torch.randint(3 * size, (2, 6 * size), generator=torch.Generator().manual_seed(at))
        graph = torch.arange(size).repeat_interleave(3)
        batches.append({"x": nodes, "edges": edges, "graph": graph, "y": numbers(size, 1, seed=at)})

    class Graphs(Rows):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            x = self.first(batch["x"])
            source, target = batch["edges"]
            for block in self.blocks:
                x = x + torch.zeros_like(x).index_add(0, target, block(x)[source])
            pooled = torch.zeros(len(batch["y"]), WIDTH, dtype=x.dtype)
            return self.head(pooled.index_add(0, batch["graph"], x))  # type: ignore[no-any-return]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(model(batch), batch["y"])

    return regression(Graphs(outputs=1), loss=loss, batches=batches)


@way()
def written_to_by_the_forward() -> Training:
    """The forward writes to the batch itself: it masks words in place."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"].clone()
        x[:, 0] = 0.0
        x.mul_(0.5)
        return F.mse_loss(model(x), batch["y"])

    batches = [{"x": x, "y": y} for x, y in rows()]
    return regression(Rows(), loss=loss, batches=batches)


@way(refusals=WHOLE)
def in_place_on_the_batch() -> Training:
    """The same without a copy: whoever has the batch sees that it changed."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        batch["x"][:, 0] = 0.0
        batch["x"].mul_(0.5)
        return F.mse_loss(model(batch["x"]), batch["y"])

    batches = [{"x": x, "y": y} for x, y in rows()]
    training = regression(Rows(), loss=loss, batches=batches)
    training.state = lambda: tree_map(lambda one: one.clone(), batches)
    return training


@way()
def square_masks_beside_samples() -> Training:
    """A causal mask as long as the batch in the first step, and not in others."""
    batches = [
        {**one, "causal": torch.ones(n := one["ids"].shape[1], n).tril().bool()}
        for one in texts(sizes=(6, 5, 2, 4, 3), lengths=(6, 5, 6, 4, 6))
    ]

    class Masked(Tokens):
        def forward(self, ids: Tensor, causal: Tensor) -> Tensor:  # type: ignore[override]
            x = self.embed(ids)
            scores = (x @ x.mT).masked_fill(~causal, -1e9)
            x = x + scores.softmax(-1) @ x
            for block in self.blocks:
                x = block(x)
            logits: Tensor = self.head(x)
            return logits

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["ids"], batch["causal"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    model = Masked()
    return Training(model=model, loss=loss, optimizer=momentum(model), batches=batches)


@way()
def queries_as_long_as_a_later_batch() -> Training:
    """Queries that come with each batch and belong to no sample; two, as the third has samples."""
    queries = numbers(2, WIDTH, seed=7)
    batches = [{**one, "queries": queries} for one in texts(sizes=(6, 5, 2, 4, 3))]

    class Asked(Tokens):
        def forward(self, ids: Tensor, queries: Tensor) -> Tensor:  # type: ignore[override]
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            found = (queries @ x.mT).softmax(-1) @ x
            logits: Tensor = self.head(found)
            return logits

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["ids"], batch["queries"])
        return F.cross_entropy(logits.flatten(0, 1), batch["ids"][:, :2].flatten())

    model = Asked()
    return Training(model=model, loss=loss, optimizer=momentum(model), batches=batches)


@way()
def other_lengths_in_each_batch() -> Training:
    """Padded to the longest of each batch, the first being the longest; words by a plain mean."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["ids"])
        return F.cross_entropy(logits.reshape(-1, WORDS), batch["ids"].reshape(-1))

    model = Tokens()
    batches = texts(sizes=(6, 5, 4, 4, 3), lengths=(9, 2, 5, 3, 7))
    return Training(model=model, loss=loss, optimizer=momentum(model), batches=batches)


@way(
    refusals={
        **dict.fromkeys(("micro_batch", "one_by_one"), "cannot be followed"),
        "fit": "Sparse",
    }
)
def sparse_inputs() -> Training:
    """A bag of words as a sparse matrix."""

    class Bags(Rows):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.sparse.mm(x, self.first.weight))

    batches = [(x.relu().to_sparse(), y) for x, y in rows()]
    return regression(Bags(), batches=batches)
