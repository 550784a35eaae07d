"""What is written down while nothing happens: little, cheaply, and without touching the model."""

from __future__ import annotations

import pytest
import torch
from simulated_gpu import SimulatedGpu
from torch import nn

from oomph.explaining import logbook
from oomph.explaining.logbook import ALWAYS, MOST_NOTES, Inputs, Logbook, Notes
from oomph.jobs.job import Job
from oomph.memory.link import InstantLink
from oomph.rehearsal.estimation import estimate
from oomph.techniques.host_optimizer import HostOptimizer
from oomph.techniques.optimizer_in_backward import OptimizerInBackward
from oomph.units import MIB


def book() -> Logbook:
    return Logbook(SimulatedGpu(64 * MIB))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, *lengths: int) -> None:
    for length in lengths:
        net(torch.ones(length, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def test_every_step_of_a_short_run_is_noted(net) -> None:
    with (log := book()).open():
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), *[3] * 10)
    assert [note.step for note in log.notes] == list(range(1, 11))


def test_steps_that_are_made_in_parts_are_counted_as_wholes(net) -> None:
    optimizer = torch.optim.AdamW(net.parameters())
    with (log := book()).open():
        in_backward = OptimizerInBackward(optimizer)
        for _ in range(3):
            with in_backward.armed():
                net(torch.ones(2, 4)).sum().backward()
        in_backward.undo()
        host = HostOptimizer(net, optimizer, InstantLink())
        with host.backward():
            net(torch.ones(2, 4)).sum().backward()
        host.step()
        host.undo()
    assert [note.step for note in log.notes] == [1, 2, 3, 4]


def test_the_steps_of_a_rehearsal_are_nobodys(net) -> None:
    optimizer = torch.optim.AdamW(net.parameters())
    with (log := book()).open():
        estimate(Job(net, lambda model, x: model(x).sum(), optimizer, torch.ones(2, 4)))
    assert log.steps == 0


def test_a_note_that_would_cost_more_than_half_a_percent_is_left_out(net, monkeypatch) -> None:
    """By a clock on which taking a note takes one tick, and a step ten."""
    log = book()

    class Clock:
        now = 0.0

        @classmethod
        def perf_counter(cls) -> float:
            cls.now += 1.0
            return cls.now

    monkeypatch.setattr(logbook, "time", Clock)
    with log.open():
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(ALWAYS + 1000):
            Clock.now += 10.0
            train(net, optimizer, 3)
    taken_late = len(log.notes) - ALWAYS
    # 1000 steps of 11 ticks or so, and two hundred ticks between two notes.
    assert 45 <= taken_late <= 65
    assert log.steps == ALWAYS + 1000


def test_notes_are_thinned_and_keep_their_first_and_last(monkeypatch) -> None:
    monkeypatch.setattr(logbook, "ALWAYS", 10**9)
    notes = Notes()
    for step in range(1, 5000):
        notes.take(SimulatedGpu(64 * MIB), step)
    assert len(notes) <= MOST_NOTES
    assert (notes[0].step, notes[-1].step) == (1, 4999)


def test_the_largest_batch_that_got_through_is_remembered(net) -> None:
    with (log := book()).open():
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), 3, 9, 5)
        net(torch.ones(20, 4))
    assert log.largest_before == Inputs(shape=(9, 4), elements=36)
    assert log.inputs == Inputs(shape=(20, 4), elements=80)


def test_evaluation_is_told_from_training(net) -> None:
    with (log := book()).open():
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        train(net, optimizer, 3)
        assert not log.evaluating
        with torch.no_grad():
            net(torch.ones(3, 4))
            net(torch.ones(3, 4))
        assert log.evaluating
        assert [note.step for note in log.eval_notes] == [1, 2]
        train(net, optimizer, 3)
        assert not log.evaluating


def test_a_wrapper_that_is_younger_than_the_optimizer_is_found(net) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = net

        def forward(self, x):
            return self.module(x)

    with (log := book()).open():
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        wrapper = Wrapper()
        train(wrapper, optimizer, 3, 3)
        assert wrapper._forward_pre_hooks
    assert log.inputs.shape == (3, 4)


def test_modules_inside_are_not_hooked(net) -> None:
    with book().open():
        torch.optim.SGD(net.parameters(), lr=0.1)
        assert net._forward_pre_hooks
        assert not any(module._forward_pre_hooks for module in net.children())


@pytest.mark.parametrize("first", ["optimizer", "compile"])
def test_a_compiled_model_is_compiled_once_and_whole(first) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x).relu()

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with (log := book()).open():
        model = Net()
        if first == "compile":
            model = torch.compile(model, backend="eager", fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if first == "optimizer":
            model = torch.compile(model, backend="eager", fullgraph=True)
        train(model, optimizer, 3, 3, 3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert log.inputs.shape == (3, 4)
    torch._dynamo.reset()


def test_an_optimizer_with_many_groups_is_looked_at_once(monkeypatch) -> None:
    looks = []
    log = book()
    monkeypatch.setattr(log, "_look_for_roots", lambda: looks.append(1))
    layers = [nn.Linear(2, 2) for _ in range(20)]
    with log.open():
        torch.optim.SGD([{"params": layer.parameters()} for layer in layers], lr=0.1)
    assert len(looks) == 2  # when the book was opened, and for the optimizer
