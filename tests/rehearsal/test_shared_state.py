"""What a rehearsed model shares with the user's is afterwards as it was."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from oomph import Job, estimate
from oomph.errors import CannotRehearse
from oomph.splitting import prove_split

SEEN: list[int] = []
CALLS = 0


class Counts(nn.Module):
    """Counts in globals and draws from streams that PyTorch knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        SEEN.append(CALLS)
        return self.linear(x) * (1 + random.random() + float(np.random.rand()))


def test_globals_closures_and_streams_are_left_alone() -> None:
    model = nn.Sequential(Counts(), nn.ReLU())
    closed: list[int] = []
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1
        closed.append(calls)

    model[1].register_forward_hook(count)
    python, numpy = random.getstate(), np.random.get_state()[2]  # type: ignore[index]
    estimate(Job(model, nn.MSELoss(), "sgd", (torch.ones(2, 4), torch.ones(2, 4))))
    assert (calls, closed, CALLS, SEEN) == (0, [], 0, [])
    assert random.getstate() == python
    assert np.random.get_state()[2] == numpy  # type: ignore[index]


def test_what_methods_close_over_and_what_a_class_holds_is_left_alone() -> None:
    closed: list[int] = []
    calls = 0

    class Noting(nn.Module):
        shapes: list[torch.Size] = []  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            closed.append(calls)
            self.shapes.append(x.shape)
            return self.linear(x)

    class Loss:
        seen: dict[str, int] = {}  # noqa: RUF012

        def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
            self.seen["calls"] = self.seen.get("calls", 0) + 1
            return model(batch).square().mean()

    job = Job(Noting(), Loss(), "sgd", torch.ones(2, 4))
    estimate(job)
    assert (calls, closed, Noting.shapes, Loss.seen) == (0, [], [], {})
    split = prove_split(job, None)
    assert "in parts that would be done once for each" in split.whole_because
    assert (calls, closed, Noting.shapes, Loss.seen) == (0, [], [], {})


def test_real_weights_beside_the_model_keep_their_gradients() -> None:
    """Those of a loss are no copies: autograd gives them the gradients of what is rehearsed."""
    given, bare = nn.Linear(4, 4), nn.Linear(4, 4)
    for parameter in given.parameters():
        parameter.grad = torch.ones_like(parameter)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return bare(given(model(batch))).sum()

    for gpu in (None, "h200"):
        estimate(Job(nn.Linear(4, 4), loss, "sgd", torch.ones(2, 4)), gpu)
        assert all(parameter.grad is None for parameter in bare.parameters())
        for parameter in given.parameters():
            assert type(parameter.grad) is Tensor
            assert torch.equal(parameter.grad, torch.ones_like(parameter))


STREAM = itertools.cycle([torch.ones(2, 4), torch.zeros(2, 4)])


class Streams:
    """Iterators, held in as many ways as a loss may hold them."""

    shared = itertools.count()

    def __init__(self) -> None:
        self.own = zip([1, 2, 3, 4, 5, 6] * 9, itertools.count(), strict=False)
        self.inside = {"of": [iter({"a": 1, "b": 2} | {str(at): at for at in range(99)})]}
        self.after = itertools.islice(itertools.chain([1], range(99)), 0, None)

    def numbers(self) -> float:
        word = next(self.inside["of"][0])
        return sum(next(self.own)) + next(self.shared) + len(word) + next(self.after)

    def all_next(self) -> list[Any]:
        given = [next(self.own), next(self.shared), next(self.inside["of"][0]), next(self.after)]
        return [*given, float(next(STREAM).sum())]


def test_iterators_are_where_they_were() -> None:
    streams, expected = Streams(), Streams().all_next()
    Streams.shared = itertools.count()
    by_default = iter(range(99))

    def loss(model: nn.Module, batch: Tensor, more: Any = by_default) -> Tensor:
        return model(batch + next(STREAM)).mean() * streams.numbers() * next(more)

    next(STREAM)
    job = Job(nn.Linear(4, 4), loss, "sgd", torch.ones(2, 4))
    estimate(job)
    assert prove_split(job, None).whole_because
    assert [*streams.all_next(), next(by_default)] == [*expected, 0]


def test_a_generator_is_used_up_by_no_rehearsal() -> None:
    stream = (torch.ones(2, 4) for _ in range(9))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch + next(stream)).mean()

    with pytest.raises(CannotRehearse, match=r"loss\.stream, a generator.* into the batch"):
        estimate(Job(nn.Linear(4, 4), loss, "sgd", torch.ones(2, 4)))
    assert len(list(stream)) == 9


def test_a_loader_is_used_up_by_no_rehearsal() -> None:
    class Semi(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.more = iter(DataLoader(torch.ones(8, 4), batch_size=2))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x + next(self.more))

    model = Semi()
    with pytest.raises(CannotRehearse, match=r"more, a _SingleProcess.* into the batch"):
        estimate(Job(model, nn.MSELoss(), "sgd", (torch.ones(2, 4), torch.ones(2, 4))))
    assert len(list(model.more)) == 4


def test_where_the_step_leaves_an_iterator_alone_it_is_rehearsed() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = nn.Linear(4, 4)
            self.model.notes = (at for at in range(3))  # type: ignore[assignment]
            self.batches = iter(DataLoader(torch.ones(8, 4), batch_size=2))

        def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
            return model(batch).square().mean()

    trainer = Trainer()
    batches, notes = trainer.batches, trainer.model.notes
    assert estimate(Job(trainer.model, trainer.loss, "sgd", torch.ones(2, 4))).fits
    assert trainer.batches is batches
    assert trainer.model.notes is notes
    assert [len(list(batches)), len(list(notes))] == [4, 3]  # type: ignore[arg-type]


def test_what_cannot_be_held_otherwise_is_refused_first() -> None:
    more = iter([1.0, 2.0])

    def loss(more: Any, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).mean() * next(more)

    bound = functools.partial(loss, more)
    with pytest.raises(CannotRehearse, match="put what it gives into the batch"):
        estimate(Job(nn.Linear(4, 4), bound, "sgd", torch.ones(2, 4)))
    assert list(more) == [1.0, 2.0]
