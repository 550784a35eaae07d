"""Between steps the user sees weights and state of the last step, although it is not complete."""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deferred_link import DeferredLink
from disk_training import Disk, undone
from host_training import Recipe, Training, same_bits
from shared_link import SharedLink
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from oomph.techniques import disk_state
from oomph.techniques.begun_step import BegunStep
from oomph.techniques.watched_tensors import is_watched, own_work, unwatch

CLIPPED = Recipe(clip_norm=0.3)


def begun(**placement: Any) -> Training:
    """A step was begun, and nobody has looked yet."""
    training = Training(recipe=CLIPPED)
    training.go_to_host(DeferredLink(), **placement)
    training.step(0)
    training.step(1)
    assert is_watched(training.model.norm.weight)
    return training


def plainly() -> Training:
    return Training(recipe=CLIPPED).run(2)


def _averaged(training: Training) -> Any:
    averaged = AveragedModel(training.model)
    averaged.update_parameters(training.model)
    return averaged.state_dict()


def _average_in_place(training: Training) -> list[Tensor]:
    average = [torch.zeros(p.shape) for p in training.model.parameters()]
    with torch.no_grad():
        for mean, p in zip(average, training.model.parameters(), strict=True):
            mean.lerp_(p, 0.5)
    return average


def _evaluated(training: Training) -> Tensor:
    with torch.no_grad():
        out: Tensor = training.model(torch.arange(6).view(2, 3), True)
    return out


def _in_threads(training: Training) -> list[Tensor]:
    found: dict[int, list[Tensor]] = {}

    def look(number: int) -> None:
        found[number] = [p.detach().clone() for p in training.model.parameters()]

    threads = [threading.Thread(target=look, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [one for number in sorted(found) for one in found[number]]


def _by_parameter(training: Training, state: Any) -> Any:
    return {
        name: {key: value.clone() for key, value in state[p].items()}
        for name, p in training.model.named_parameters()
        if p in state
    }


LOOKS: dict[str, Callable[[Training], Any]] = {
    "a state dict": lambda t: {k: v.clone() for k, v in t.model.state_dict().items()},
    "a copied model": lambda t: copy.deepcopy(t.model).state_dict(),
    "parameters": lambda t: [p.clone() for p in t.model.parameters()],
    "the last parameter first": lambda t: [p.clone() for p in reversed([*t.model.parameters()])],
    "one norm": lambda t: t.model.norm.weight.norm(),
    "a vector": lambda t: nn.utils.parameters_to_vector(t.model.parameters()),
    "an averaged model": _averaged,
    "an average in place": _average_in_place,
    "a forward": _evaluated,
    "a block's forward": lambda t: t.model.blocks[1](torch.ones(1, 16)),
    "threads": _in_threads,
    "the optimizer's groups": lambda t: [
        p.clone() for group in t.optimizer.param_groups for p in group["params"]
    ],
    "the optimizer's state": lambda t: _by_parameter(t, t.optimizer.state),
    "all of the optimizer's state": lambda t: _by_parameter(t, dict(t.optimizer.state.items())),
    "a copy of the optimizer's state": lambda t: _by_parameter(t, t.optimizer.state.copy()),
    "the optimizer's state dict": lambda t: t.optimizer.state_dict()["state"],
}


def _same(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        ours, theirs = [ours[key] for key in theirs], list(theirs.values())
    if isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            _same(one, other)
    else:
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("how", LOOKS)
def test_whoever_looks_sees_the_last_step(how: str, share: float) -> None:
    training = begun(host_share=share)
    _same(LOOKS[how](training), LOOKS[how](plainly()))
    training.step(2)
    assert training.host is not None
    training.host.settle()
    _same(LOOKS["parameters"](training), LOOKS["parameters"](Training(recipe=CLIPPED).run(3)))


def test_state_is_taken_away_as_from_a_dictionary() -> None:
    training, plain = begun(), plainly()
    state = training.optimizer.state
    first, *_ = training.model.parameters()
    its, expected = state.pop(first), plain.optimizer.state.pop(next(plain.model.parameters()))
    _same(its, expected)
    assert state.pop(first, "nothing") == "nothing"
    with pytest.raises(KeyError):
        state.pop(first)
    assert first not in state and len(state) == len(plain.optimizer.state)


def test_who_looks_at_one_weight_does_not_complete_the_whole_step() -> None:
    training = begun()
    torch.sum(training.model.embed.weight)
    assert not is_watched(training.model.embed.weight)
    assert is_watched(training.model.norm.weight)


def _clip(training: Training) -> None:
    for p in training.model.parameters():
        p.data.clamp_(-0.1, 0.1)


@torch.no_grad()
def _scale(training: Training) -> None:
    for p in training.model.parameters():
        p.mul_(0.5)


def _replace(training: Training) -> None:
    for p in training.model.parameters():
        p.data = p.data * 0.5


def _load(training: Training) -> None:
    state = training.model.state_dict()
    training.model.load_state_dict({key: value * 0.5 for key, value in state.items()})


def _look_and_clip(training: Training) -> None:
    sum(p.sum() for p in training.model.parameters())
    _clip(training)


def _damp(training: Training) -> None:
    for p in training.model.parameters():
        if "exp_avg" in training.optimizer.state[p]:
            training.optimizer.state[p]["exp_avg"].mul_(0.5)


def _lower_rate(training: Training) -> None:
    for group in training.optimizer.param_groups:
        group["lr"] *= 0.1


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("clip_norm", [0.3, None])
@pytest.mark.parametrize(
    "write", [_clip, _scale, _replace, _load, _look_and_clip, _damp, _lower_rate]
)
def test_what_is_written_between_steps_counts(
    write: Callable[[Training], None], clip_norm: float | None, share: float
) -> None:
    ours, theirs = (Training(recipe=Recipe(clip_norm=clip_norm)) for _ in range(2))
    host = ours.go_to_host(DeferredLink(), host_share=share)
    for training in (ours, theirs):
        for step in range(5):
            training.step(step)
            if step != 2:
                write(training)
    host.settle()
    for p, q in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_memory_that_somebody_holds_is_stepped_at_once() -> None:
    training = Training(recipe=CLIPPED)
    training.go_to_host(DeferredLink())
    held = training.model.norm.weight.detach()
    theirs = Training(recipe=CLIPPED)
    for step in range(3):
        training.step(step)
        theirs.step(step)
        assert torch.equal(held, theirs.model.norm.weight)


class Owner:
    """Whoever steps: notes what may have been written to unseen."""

    def __init__(self) -> None:
        self.changed: list[tuple[Tensor, bool]] = []

    def have_stepped(self, leaves: Any) -> None:
        """There is nothing to step."""

    def may_have_changed(self, leaf: Tensor, in_forward: bool) -> None:
        self.changed.append((leaf, in_forward))


def test_only_who_holds_the_memory_of_a_copied_weight_may_write_unseen() -> None:
    owner, weight, other = Owner(), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    begun = BegunStep(owner.have_stepped, owner.may_have_changed)
    begun.watch([other], copied=[weight])
    assert (weight * 2).sum() == 6 and other.detach().sum() == 3
    assert not owner.changed
    held = weight.detach()
    assert [(leaf is weight, in_forward) for leaf, in_forward in owner.changed] == [(True, False)]
    assert is_watched(weight), "what comes next is seen, too"
    del owner
    assert torch.equal(weight.detach(), held), "nobody is left to be told"
    unwatch(weight)


def test_undone_everything_is_plain_again() -> None:
    training = begun(host_share=0.5)
    assert training.host is not None
    training.host.undo()
    assert all(type(p) is nn.Parameter and not vars(p) for p in training.model.parameters())
    assert type(training.optimizer.state) is defaultdict
    assert torch.equal(training.model.embed.weight, training.model.head.weight)


def test_state_on_the_disk_is_shown_to_who_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_state, "LEAST", 0)
    link = SharedLink()
    training = Training(recipe=CLIPPED)
    training.go_to_host(link, disk=Disk(link, tmp_path), disk_share=1.0)
    training.step(0)
    training.step(1)
    weight = training.model.blocks[0].up.weight
    with own_work():
        assert training.optimizer.state[weight]["exp_avg"].isnan().all()
    theirs = plainly()
    expected = theirs.optimizer.state[theirs.model.blocks[0].up.weight]["exp_avg"]
    assert torch.equal(training.optimizer.state[weight]["exp_avg"], expected)
    training.step(2)
    same_bits(undone(training), Training(recipe=CLIPPED).run(3))


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("clip_norm", [0.3, None])
def test_what_a_forward_writes_to_its_weights_counts(clip_norm: float | None, share: float) -> None:
    """Through `data`, where no version tells."""

    def limits(module: nn.Module, _: Any) -> None:
        module.weight.data.clamp_(-0.1, 0.1)

    def prepare(model: nn.Module) -> None:
        model.blocks[1].up.register_forward_pre_hook(limits)

    recipe = Recipe(clip_norm=clip_norm, prepare=prepare)
    ours, theirs = Training(recipe=recipe), Training(recipe=recipe).run(5)
    host = ours.go_to_host(DeferredLink(), host_share=share)
    ours.run(5)
    host.settle()
    for p, q in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(p, q)
