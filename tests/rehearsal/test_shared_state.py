"""What a rehearsed model shares with the user's is afterwards as it was."""

from __future__ import annotations

import array
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


def test_tensors_that_a_loss_writes_to_are_left_alone() -> None:
    """A loss is no copy: it may hold a teacher in training mode, a counter, or an average."""
    teacher = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4)
    )
    steps, average, made = torch.zeros((), dtype=torch.long), torch.zeros(4), torch.zeros(4)
    held = {**teacher.state_dict(), "steps": steps, "average": average, "made": made}
    before = {name: one.clone() for name, one in held.items()}

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        steps.add_(1)
        average[1:].add_(steps)
        average.mul_(0.9).add_(torch.ones(4), alpha=0.1)
        torch.mv(torch.ones(4, 4), average, out=made)
        teacher(torch.ones(2, 4))
        return (model(batch) * average - teacher(batch)).square().mean() / steps

    for gpu in (None, "h200"):
        job = Job(nn.Linear(4, 4), loss, "sgd", torch.ones(2, 4))
        estimate(job, gpu)
        assert prove_split(job, None).whole_because
        assert all(torch.equal(one, before[name]) for name, one in held.items())


def test_what_a_loss_wrote_to_is_known_by_its_new_numbers() -> None:
    steps, seen, own = torch.zeros((), dtype=torch.long), [], torch.zeros(2)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        steps.add_(1)
        seen.append(int(steps))
        out = model(batch).mean()
        own.copy_(out.detach())
        return out if (own == own).all() else out * 2

    notes = estimate(Job(nn.Linear(4, 4), loss, "sgd", torch.ones(2, 4))).notes
    assert not any("read from a tensor" in note for note in notes)
    assert steps == 0
    assert not own.any()


class Slotted:
    """Holds what it holds in slots, as `dataclass(slots=True)` has it."""

    __slots__ = ("__own", "calls", "later")

    def __init__(self) -> None:
        self.calls, self.__own = 0, [0]

    def see(self) -> int:
        self.calls += 1
        self.__own[0] += 1
        self.later = self.calls
        return self.__own[0]


HISTOGRAM = np.zeros(3)


class Everywhere:
    """Counts in arrays and slots, in all the places that it can reach."""

    of_all = np.zeros(2, dtype=int)

    def __init__(self) -> None:
        self.masked = np.ma.array([0.0, 1.0], mask=[False, True])
        self.numbers, self.bytes = array.array("d", [0.0]), bytearray(2)
        self.inside = {"of": [np.zeros((2, 2)).T]}
        self.slots = Slotted()

    def count(self) -> None:
        HISTOGRAM[0] += 1
        self.of_all[0] += 1
        self.masked += 1
        self.numbers[0] += 1
        self.bytes[1] += 1
        self.inside["of"][0][1] += 1
        self.slots.see()

    def counted(self) -> list[Any]:
        arrays = (HISTOGRAM, self.of_all, self.masked, self.inside["of"][0])
        slots = [self.slots.calls, hasattr(self.slots, "later")]
        return [*(one.tolist() for one in arrays), *self.numbers, *self.bytes, *slots]


def test_arrays_and_slots_are_left_alone() -> None:
    by_loss, by_forward = Everywhere(), Everywhere()

    class Noting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            by_forward.count()
            return super().forward(x)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        by_loss.count()
        return model(batch).square().mean()

    before = by_loss.counted(), by_forward.counted()
    job = Job(Noting(4, 4), loss, "sgd", torch.ones(2, 4))
    estimate(job)
    assert "in parts that would be done once for each" in prove_split(job, None).whole_because
    assert (by_loss.counted(), by_forward.counted()) == before


def test_what_an_optimizers_step_counts_is_left_alone() -> None:
    logged: list[float] = []
    hooked, wrapped, shared = Everywhere(), {"calls": 0}, {"calls": 0}

    class Logging(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            logged.append(self.param_groups[0]["lr"])
            super().step(closure)

    def wrap(optimizer: torch.optim.Optimizer) -> None:
        step = optimizer.step

        def counting(closure: Any = None) -> Any:
            wrapped["calls"] += 1
            return step(closure)

        optimizer.step = counting  # type: ignore[method-assign]

    def make(parameters: Any) -> torch.optim.Optimizer:
        shared["calls"] += 1
        return torch.optim.SGD(parameters, 0.1)

    for kind in (Logging, torch.optim.SGD):
        model = nn.Linear(4, 4)
        optimizer = kind(model.parameters(), 0.1)
        optimizer.register_step_post_hook(lambda *_: hooked.count())
        if kind is torch.optim.SGD:
            wrap(optimizer)
        before = hooked.counted()
        estimate(Job(model, nn.MSELoss(), optimizer, (torch.ones(2, 4), torch.ones(2, 4))))
        assert (logged, hooked.counted(), wrapped["calls"]) == ([], before, 0)
    estimate(Job(nn.Linear(4, 4), nn.MSELoss(), make, (torch.ones(2, 4), torch.ones(2, 4))))
    assert shared["calls"] == 0


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
