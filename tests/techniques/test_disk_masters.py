"""Masters on the disk: trained to the bit as in host memory, shown to whoever reads, never lost."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from deferred_link import CountingLink
from disk_training import Disk, trained_on_disk, undone
from host_training import (
    Recipe,
    Training,
    fail_once,
    nearly,
    overflowing,
    plain,
    same_batch_again,
    same_bits,
    two_groups,
    warm_up,
)
from scarce_disk import ScarceDisk
from shared_link import SharedLink
from torch import Tensor

from oomph.errors import DiskDamaged, DiskFull, HostMemoryFull
from oomph.memory import limits
from oomph.memory.limits import HostLimits
from oomph.memory.link import InstantLink, Link
from oomph.techniques import disk_state
from oomph.techniques.disk_state import MASTER, DiskState
from oomph.techniques.streamed_weights import StreamedWeights

STEPS = 7

RECIPES = {
    "inside backward": Recipe(masters=True),
    "clipped": Recipe(masters=True, clip_norm=0.3),
    "in parts": Recipe(masters=True, parts=2),
    "in parts, clipped": Recipe(masters=True, parts=2, clip_norm=0.3),
    "scheduled": Recipe(masters=True, schedule=warm_up),
    "scaled": Recipe(masters=True, scaler=overflowing),
    "momentum": Recipe(
        masters=True,
        make_optimizer=lambda model: torch.optim.SGD(two_groups(model), lr=1e-2, momentum=0.9),
    ),
    "no state": Recipe(
        masters=True, make_optimizer=lambda model: torch.optim.SGD(two_groups(model), lr=1e-2)
    ),
}


@pytest.fixture(autouse=True)
def _every_parameter_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_state, "LEAST", 0)


@functools.cache
def plainly(name: str, steps: int = STEPS) -> Training:
    return plain(RECIPES[name], steps)


def on_disk(
    name: str, folder: Path, link: Link | None = None, steps: int = STEPS, **placement: Any
) -> Training:
    return trained_on_disk(RECIPES[name], folder, link, steps, **placement)


def masters_of(training: Training) -> dict[str, Tensor]:
    """What the optimizer shows of the parameters that have a master."""
    assert training.masters is not None
    of_all = {n: training.masters.master_of(p) for n, p in training.model.named_parameters()}
    own = dict(training.model.named_parameters())
    return {name: master for name, master in of_all.items() if master is not own[name]}


def same_masters(shown: dict[str, Tensor], other: Training) -> None:
    expected = masters_of(other)
    assert shown.keys() == expected.keys() and expected
    for name, master in expected.items():
        assert torch.equal(shown[name].detach().cpu(), master.detach().cpu()), name


# -- the same numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_steps_have_the_plain_bits(name: str, tmp_path: Path) -> None:
    same_bits(undone(on_disk(name, tmp_path)), plainly(name))


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_some_may_stay_in_memory(share: float, tmp_path: Path) -> None:
    same_bits(undone(on_disk("clipped", tmp_path, disk_share=share)), plainly("clipped"))


@pytest.mark.parametrize("name", ["inside backward", "clipped"])
def test_some_may_stay_on_the_gpu(name: str, tmp_path: Path) -> None:
    trained = on_disk(name, tmp_path, disk_share=0.4, gpu_share=0.3)
    kinds = {bool(master.isnan().any()) for master in masters_of(trained).values()}
    assert kinds == {True, False}
    same_bits(undone(trained), plainly(name))


def test_the_host_steps_what_is_in_its_memory(tmp_path: Path) -> None:
    trained = on_disk("clipped", tmp_path, disk_share=0.4, host_share=0.3)
    nearly(undone(trained), plainly("clipped"))


@pytest.mark.parametrize(("eager", "seed"), [(0.0, 0), (0.3, 1), (0.6, 2), (1.0, 3)])
@pytest.mark.parametrize("buffers", [2, 100])
@pytest.mark.parametrize("name", ["in parts", "in parts, clipped"])
def test_whenever_copies_happen(
    name: str, eager: float, seed: int, buffers: int, tmp_path: Path
) -> None:
    link = SharedLink(eager=eager, seed=seed)
    training = Training(recipe=RECIPES[name])
    disk = Disk(link, tmp_path, most=buffers)
    training.go_to_host(link, disk=disk, disk_share=0.7, bucket=3000, early=3)
    same_bits(undone(training.run(STEPS)), plainly(name))


def test_over_a_hundred_steps(tmp_path: Path) -> None:
    trained = on_disk("clipped", tmp_path, InstantLink(), 100, bucket=3000)
    same_bits(undone(trained), plainly("clipped", 100))


@pytest.mark.parametrize("name", ["inside backward", "clipped"])
def test_beside_weights_that_are_away(name: str, tmp_path: Path) -> None:
    link = SharedLink(eager=0.3)
    training = Training(recipe=RECIPES[name])
    streamed = StreamedWeights(training.model, ["blocks.0", "blocks.2"], link)
    training.go_to_host(link, weights=streamed, disk=Disk(link, tmp_path), disk_share=0.7)
    training.run(STEPS)
    undone(training)
    streamed.undo()
    same_bits(training, plainly(name))


def test_masters_that_were_trained_before_go_to_the_disk(tmp_path: Path) -> None:
    training = plain(RECIPES["clipped"], 3)
    link = SharedLink()
    training.go_to_host(link, disk=Disk(link, tmp_path), disk_share=1.0)
    same_bits(undone(training.run(STEPS - 3)), plainly("clipped"))


# -- memory ----------------------------------------------------------------------------------------


class Small(CountingLink, SharedLink):
    pass


def test_they_take_no_host_memory(tmp_path: Path) -> None:
    def taken(recipe: Recipe) -> int:
        link = Small()
        training = Training(recipe=recipe)
        disk = Disk(link, tmp_path, most=2)
        training.go_to_host(link, disk=disk, disk_share=1.0, bucket=2000)
        training.run(2)
        held = sum(link.live.values())
        undone(training)
        assert not link.live
        return held

    assert taken(Recipe(masters=True)) == taken(Recipe())


def test_between_two_steps_the_optimizer_has_nothing_of_them(tmp_path: Path) -> None:
    training = on_disk("clipped", tmp_path, steps=2)
    shown = masters_of(training)
    assert sum(master.untyped_storage().nbytes() for master in shown.values()) == 4 * len(shown)
    assert all(master.isnan().all() for master in shown.values())
    training.step(2)
    shown = masters_of(training)
    assert sum(master.untyped_storage().nbytes() for master in shown.values()) == 4 * len(shown)
    undone(training)


def test_a_stand_in_cannot_be_written_to(tmp_path: Path) -> None:
    training = on_disk("clipped", tmp_path, steps=2)
    for master in masters_of(training).values():
        with pytest.raises(RuntimeError, match="single memory location"):
            master.mul_(2)
    same_bits(undone(training.run(STEPS - 2)), plainly("clipped"))


# -- who reads and writes them ---------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 3])
def test_a_state_dict_has_them_shown_and_the_next_step_goes_on(steps: int, tmp_path: Path) -> None:
    ours, theirs = on_disk("clipped", tmp_path, steps=steps), plain(RECIPES["clipped"], steps)
    ours.optimizer.state_dict()
    same_masters(masters_of(ours), theirs)
    assert ours.host is not None
    ours.host.settle()
    same_masters(masters_of(ours), theirs)
    same_bits(undone(ours.run(STEPS - steps)), plainly("clipped"))


def test_undone_while_they_are_shown_they_stay(tmp_path: Path) -> None:
    ours = on_disk("clipped", tmp_path)
    ours.optimizer.state_dict()
    same_bits(undone(ours), plainly("clipped"))


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("then_undone", [False, True])
def test_what_is_written_to_one_that_is_shown_counts(
    through_data: bool, then_undone: bool, tmp_path: Path
) -> None:
    ours, theirs = on_disk("clipped", tmp_path, steps=3), plain(RECIPES["clipped"], 3)
    for training in (ours, theirs):
        training.optimizer.state_dict()
        assert training.masters is not None
        for master in masters_of(training).values():
            (master.data if through_data else master).mul_(0.5)
            training.masters.refresh(master)
    if then_undone:
        undone(ours)
    ours.run(2)
    theirs.run(2)
    same_bits(ours if then_undone else undone(ours), theirs)


def test_each_can_be_read_by_itself(tmp_path: Path) -> None:
    ours, theirs = on_disk("clipped", tmp_path, steps=3), plain(RECIPES["clipped"], 3)
    assert ours.host is not None
    shown = masters_of(ours)
    same_masters({name: ours.host.numbers(master) for name, master in shown.items()}, theirs)
    assert all(master.isnan().all() for master in shown.values())
    undone(ours)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_rounded_again_they_are_what_the_model_has(share: float, tmp_path: Path) -> None:
    ours = on_disk("inside backward", tmp_path, steps=2, disk_share=share)
    assert ours.masters is not None
    before = copy.deepcopy(ours.model.state_dict())
    for master in masters_of(ours).values():
        ours.masters.refresh(master)
    for name, value in ours.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    undone(ours)


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("shown", [False, True])
def test_a_plain_training_can_be_loaded(before: int, shown: bool, tmp_path: Path) -> None:
    theirs = plain(RECIPES["clipped"], 4)
    ours = on_disk("clipped", tmp_path, steps=before)
    if shown:
        ours.optimizer.state_dict()
    ours.go_on_from(theirs)
    same_bits(undone(ours.run(2)), theirs.run(2))


def test_another_type_is_rounded_as_in_memory(tmp_path: Path) -> None:
    numbers = {
        name: torch.randn(p.shape, dtype=torch.float64)
        for name, p in Training(recipe=RECIPES["clipped"]).model.named_parameters()
    }
    both = on_disk("clipped", tmp_path, steps=2), plain(RECIPES["clipped"], 2)
    for training in both:
        assert training.masters is not None
        own = dict(training.model.named_parameters())
        for name in masters_of(training):
            training.masters.write(own[name], numbers[name])
    same_bits(undone(both[0]), both[1])


# -- what may go wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["clipped", "in parts, clipped"])
def test_a_failed_backward_leaves_nothing_behind(name: str, tmp_path: Path) -> None:
    trained = on_disk(name, tmp_path, steps=3)
    fail_once(trained.model)
    with same_batch_again(trained), pytest.raises(RuntimeError, match="in the middle"):
        trained.step(3)
    same_bits(undone(trained.run(STEPS - 3)), plainly(name))


def test_a_step_that_broke_off_leaves_each_as_before_or_after(tmp_path: Path) -> None:
    training = on_disk("inside backward", tmp_path, steps=2)
    assert training.host is not None
    fail_once(training.model)
    with pytest.raises(RuntimeError, match="in the middle"):
        training.step(2)
    assert training.host.dirty
    found = masters_of(undone(training))
    before, after = (
        masters_of(plainly("inside backward", 2)),
        masters_of(plainly("inside backward", 3)),
    )
    stepped = {name for name, one in found.items() if not torch.equal(one, before[name])}
    assert 0 < len(stepped) < len(found)
    assert all(torch.equal(found[name], after[name]) for name in stepped)
    for name, parameter in training.model.named_parameters():
        if name in found:
            assert torch.equal(parameter, found[name].to(parameter.dtype)), name


def test_a_disk_without_room_for_them_is_noticed_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ScarceDisk(monkeypatch, 2)  # room for the state of the first piece, and not for its master
    training = plain(RECIPES["clipped"], 2)
    link = SharedLink()
    with pytest.raises(DiskFull):
        training.go_to_host(link, disk=Disk(link, tmp_path), disk_share=1.0)
    training.host = None
    same_bits(training.run(2), plain(RECIPES["clipped"], 4))


def test_a_disk_that_fails_on_the_way_out_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0

    def write(self: DiskState, trained: Any, tensors: Any) -> None:
        nonlocal written
        written += MASTER in tensors
        if written > 3:
            raise OSError("the disk is gone")
        real(self, trained, tensors)

    real = DiskState.write
    training = plain(RECIPES["clipped"], 2)
    link = Small()
    with monkeypatch.context() as patch:
        patch.setattr(DiskState, "write", write)
        with pytest.raises(OSError, match="the disk is gone"):
            training.go_to_host(link, disk=Disk(link, tmp_path), disk_share=1.0)
    training.host = None
    assert list(tmp_path.iterdir()) == []
    same_bits(training.run(2), plain(RECIPES["clipped"], 4))


@pytest.mark.parametrize("name", ["inside backward", "clipped"])
def test_a_bit_that_flips_on_the_disk_is_never_stepped_with(name: str, tmp_path: Path) -> None:
    link = InstantLink()
    disk = Disk(link, tmp_path, most=2)
    training = Training(recipe=RECIPES[name])
    host = training.go_to_host(link, disk=disk, disk_share=1.0)
    training.run(2)
    assert host._disk is not None
    of_masters = [slot for (_, _, name), slot in host._disk._slots.items() if name == MASTER]
    place = disk.opened[0]._disk._slots[of_masters[0]]
    assert place.last_write is not None
    place.last_write.checksums = [value ^ 1 for value in place.last_write.checksums]
    with pytest.raises(DiskDamaged, match="other bytes came back"):
        for _ in range(2):  # its buffer may hold what was written
            training.run(1)
    assert host.dirty
    place.last_write.checksums = [value ^ 1 for value in place.last_write.checksums]
    undone(training)


def test_memory_that_runs_out_while_they_come_leaves_no_copy_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = on_disk("clipped", tmp_path, steps=3)
    tensors, real = 5, disk_state.gpu_like

    def scarce(*args: Any) -> Tensor:
        nonlocal tensors
        tensors -= 1
        if tensors < 0:
            raise torch.OutOfMemoryError("no room")
        return real(*args)

    with (
        monkeypatch.context() as patch,
        same_batch_again(training),
        pytest.raises(torch.OutOfMemoryError),
    ):
        patch.setattr(disk_state, "gpu_like", scarce)
        training.step(3)
    assert training.host is not None and not training.host.dirty
    training.host.abandon()
    same_bits(undone(training.run(STEPS - 3)), plainly("clipped"))


def test_a_host_too_small_to_show_all_says_so_and_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = on_disk("no state", tmp_path, steps=3)
    tiny = HostLimits(memory=100, memory_limit="a small machine", lockable=None)
    with monkeypatch.context() as patch:
        patch.setattr(limits, "host_limits", lambda *_: tiny)
        with pytest.raises(HostMemoryFull, match="on the disk"):
            ours.optimizer.state_dict()
    same_bits(undone(ours.run(STEPS - 3)), plainly("no state"))
