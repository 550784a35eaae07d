"""Gradients that wait on the disk: trained to the bit as with those in host memory, or an error."""

from __future__ import annotations

import dataclasses
import functools
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from deferred_link import CountingLink
from disk_training import Disk, undone
from host_training import (
    WIDTH,
    Net,
    Recipe,
    Training,
    fail_once,
    little_room,
    nearly,
    overflowing,
    plain,
    same_batch_again,
    same_bits,
    two_groups,
    warm_up,
)
from memory_slots import MemorySlots
from scarce_disk import ScarceDisk
from shared_link import SharedLink
from torch import nn

from oomph.errors import BadInput, DiskDamaged, DiskFull, HostMemoryFull
from oomph.memory import limits
from oomph.memory.disk_store import NumberedDiskStore
from oomph.memory.limits import HostLimits
from oomph.memory.link import InstantLink, Link
from oomph.memory.scratch_file import ScratchFile
from oomph.techniques import disk_state
from oomph.techniques import disk_weights as cold_weights
from oomph.techniques.disk_weights import OnDisk
from oomph.techniques.step_buckets import cuts_of
from oomph.techniques.streamed_weights import StreamedWeights

STEPS = 7


def channels_first_and_last(model: Net) -> None:
    """A parameter that does not lie in one row."""
    model.blocks[1].up.weight.data = model.blocks[1].up.weight.data.t().contiguous().t()


RECIPES = {
    "clipped": Recipe(clip_norm=0.3),
    "scaled": Recipe(scaler=overflowing),
    "scaled, clipped": Recipe(scaler=overflowing, clip_norm=0.3),
    "in parts": Recipe(parts=2),
    "in four parts": Recipe(parts=4),
    "in parts, clipped": Recipe(parts=2, clip_norm=0.3),
    "in four parts, scaled, clipped": Recipe(parts=4, clip_norm=0.3, scaler=overflowing),
    "scheduled, clipped": Recipe(schedule=warm_up, clip_norm=0.3),
    "bf16, in parts, clipped": Recipe(dtype=torch.bfloat16, parts=2, clip_norm=0.3),
    "masters, clipped": Recipe(masters=True, clip_norm=0.3),
    "masters, in parts": Recipe(masters=True, parts=2),
    "masters, in parts, clipped": Recipe(masters=True, parts=2, clip_norm=0.3),
    "lying otherwise, in parts, clipped": Recipe(
        prepare=channels_first_and_last, parts=2, clip_norm=0.3
    ),
    "of whole matrices, in parts, clipped": Recipe(
        make_optimizer=lambda model: torch.optim.Adafactor(two_groups(model)),
        parts=2,
        clip_norm=0.3,
    ),
    "inside backward": Recipe(),
}


@pytest.fixture(autouse=True)
def _every_parameter_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_state, "LEAST", 0)
    monkeypatch.setattr(cold_weights, "LEAST", 0)


@functools.cache
def plainly(name: str, steps: int = STEPS) -> Training:
    return plain(RECIPES[name], steps)


def going(name: str, disk: Disk, **placement: Any) -> Training:
    """All of its gradients leave for the disk, unless the placement says so."""
    training = Training(recipe=RECIPES[name])
    how = {"keep_gradients": 0, "gradients_to_disk": True, **placement}
    training.go_to_host(disk.link, disk=disk, **how)
    return training


def on_disk(
    name: str, folder: Path, link: Link | None = None, steps: int = STEPS, **placement: Any
) -> Training:
    return going(name, Disk(link or SharedLink(), folder), **placement).run(steps)


# -- the same numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_steps_have_the_plain_bits(name: str, tmp_path: Path) -> None:
    same_bits(undone(on_disk(name, tmp_path)), plainly(name))


@pytest.mark.parametrize("name", ["clipped", "in parts", "in parts, clipped"])
@pytest.mark.parametrize("kept", [1500, 6000, 1 << 30])
def test_some_may_stay_on_the_gpu(name: str, kept: int, tmp_path: Path) -> None:
    same_bits(undone(on_disk(name, tmp_path, keep_gradients=kept)), plainly(name))


@pytest.mark.parametrize("name", ["clipped", "in parts", "masters, in parts, clipped"])
@pytest.mark.parametrize("shares", [{"disk_share": 1.0}, {"disk_share": 0.4, "gpu_share": 0.3}])
def test_beside_state_on_the_disk(name: str, shares: dict[str, float], tmp_path: Path) -> None:
    same_bits(undone(on_disk(name, tmp_path, **shares)), plainly(name))


@pytest.mark.parametrize("name", ["clipped", "in parts", "in parts, clipped"])
def test_what_the_host_steps_has_its_gradients_in_memory(name: str, tmp_path: Path) -> None:
    training = on_disk(name, tmp_path, host_share=0.4)
    assert training.host is not None
    gradients, stepped = training.host._gradients, training.host._order.host_stepped
    assert gradients.disk is not None and stepped
    assert set(gradients._slots) == stepped
    assert {one for one in training.host._trained if one in gradients.disk} == {
        one for one in training.host._trained if one not in stepped
    }
    nearly(undone(training), plainly(name))


@pytest.mark.parametrize("cold", [False, True], ids=["on the host", "on the disk"])
@pytest.mark.parametrize("name", ["clipped", "masters, clipped", "in parts", "in parts, clipped"])
def test_beside_weights_that_are_away(name: str, cold: bool, tmp_path: Path) -> None:
    link = SharedLink(eager=0.3)
    disk = Disk(link, tmp_path)
    training = Training(recipe=RECIPES[name])
    paths = ["blocks.0", "blocks.2"]

    def cut(parameter: nn.Parameter) -> tuple[range, ...]:
        return cuts_of(parameter, 4, 1024)

    there = OnDisk(blocks=paths, open_store=disk, cut=cut) if cold else None
    streamed = StreamedWeights(training.model, paths, link, on_disk=there)
    training.go_to_host(
        link, weights=streamed, disk=disk, keep_gradients=2000, gradients_to_disk=True
    )
    training.run(STEPS)
    undone(training)
    streamed.undo()
    same_bits(training, plainly(name))


@pytest.mark.parametrize(("eager", "seed"), [(0.0, 0), (0.3, 1), (0.6, 2), (1.0, 3)])
@pytest.mark.parametrize("buffers", [2, 3, 100])
@pytest.mark.parametrize("name", ["in parts", "in parts, clipped"])
def test_whenever_copies_happen(
    name: str, eager: float, seed: int, buffers: int, tmp_path: Path
) -> None:
    disk = Disk(SharedLink(eager=eager, seed=seed), tmp_path, most=buffers)
    training = going(name, disk, disk_share=0.5, bucket=3000, early=3)
    same_bits(undone(training.run(STEPS)), plainly(name))


def test_over_a_hundred_steps(tmp_path: Path) -> None:
    name = "bf16, in parts, clipped"
    trained = on_disk(name, tmp_path, InstantLink(), 100, bucket=3000)
    same_bits(undone(trained), plainly(name, 100))


def test_slots_in_memory_do_as_well() -> None:
    link = SharedLink()
    training = Training(recipe=RECIPES["in parts, clipped"])
    training.go_to_host(
        link, disk=lambda *_: MemorySlots(link), keep_gradients=0, gradients_to_disk=True
    )
    same_bits(undone(training.run(STEPS)), plainly("in parts, clipped"))


# -- memory ----------------------------------------------------------------------------------------


class Small(CountingLink, SharedLink):
    pass


@pytest.mark.parametrize("name", ["clipped", "in parts", "masters, in parts, clipped"])
def test_only_what_is_under_way_takes_host_memory(name: str, tmp_path: Path) -> None:
    bucket, buffers = 1024, 2

    def taken(**placement: Any) -> int:
        link = Small()
        training = going(name, Disk(link, tmp_path, most=buffers), bucket=bucket, **placement)
        training.run(4)
        held = sum(link.live.values())
        undone(training)
        assert not link.live
        return held

    nothing_leaves = taken(keep_gradients=None)
    assert taken() == nothing_leaves + buffers * bucket
    in_memory = taken(gradients_to_disk=False)
    gradients = sum(p.numel() for p in Net().parameters() if p.requires_grad) * 4
    assert in_memory == nothing_leaves + gradients


def test_small_ones_wait_in_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_state, "LEAST", 4 * WIDTH + 1)
    training = on_disk("in parts, clipped", tmp_path)
    assert training.host is not None
    gradients = training.host._gradients
    assert gradients.disk is not None
    for trained in training.host._trained:
        is_small = trained.leaf.numel() <= WIDTH
        assert (trained in gradients.disk, trained in gradients._slots) == (not is_small, is_small)
    same_bits(undone(training), plainly("in parts, clipped"))


@pytest.mark.parametrize("placement", [{"keep_gradients": None}, {"gradients_to_disk": False}])
def test_where_none_leave_for_it_no_disk_is_opened(
    placement: dict[str, Any], tmp_path: Path
) -> None:
    disk = Disk(SharedLink(), tmp_path)
    undone(going("clipped", disk, **placement).run(1))
    assert not disk.opened


def test_undo_closes_the_disk(tmp_path: Path) -> None:
    disk = Disk(SharedLink(), tmp_path)
    undone(going("in parts, clipped", disk).run(2))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(AssertionError, match="closed"):
        disk.opened[0]._disk.write(0, torch.zeros(1, dtype=torch.uint8))


# -- who looks while a step is pending -------------------------------------------------------------


def test_a_step_that_was_begun_is_complete_in_a_state_dict(tmp_path: Path) -> None:
    ours, theirs = (
        on_disk("in parts, clipped", tmp_path, steps=2),
        Training(recipe=RECIPES["in parts, clipped"]).run(3),
    )
    ours.step(2)
    assert ours.host is not None and ours.host._next is not None, "it is only begun"
    expected = theirs.optimizer.state_dict()["state"]
    for number, state in ours.optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(value, expected[number][name]), (number, name)
    same_bits(undone(ours.run(STEPS - 3)), plainly("in parts, clipped"))


def test_a_step_that_was_begun_is_complete_when_undone(tmp_path: Path) -> None:
    ours = on_disk("clipped", tmp_path, steps=STEPS - 1)
    ours.step(STEPS - 1)
    same_bits(undone(ours), plainly("clipped"))


# -- what may go wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["clipped", "in four parts", "masters, in parts, clipped"])
def test_a_failed_backward_leaves_nothing_behind(name: str, tmp_path: Path) -> None:
    trained = on_disk(name, tmp_path, steps=3)
    fail_once(trained.model)
    with same_batch_again(trained), pytest.raises(RuntimeError, match="in the middle"):
        trained.step(3)
    same_bits(undone(trained.run(STEPS - 3)), plainly(name))


def test_a_batch_that_is_dropped_leaves_the_step_before_it_alone(tmp_path: Path) -> None:
    ours = on_disk("clipped", tmp_path, steps=2)
    assert ours.host is not None
    ours.step(2)
    with same_batch_again(ours):
        tokens = torch.randint(0, 24, (4, 6), generator=ours.generator)
        loss = ours.model(tokens, False).sum()
        with ours.host.backward(last=False):
            loss.backward()
        ours.host.abandon()
    same_bits(undone(ours.run(STEPS - 3)), plainly("clipped"))


@pytest.mark.parametrize("room", [0, 3])
@pytest.mark.parametrize("name", ["clipped", "in parts"])
def test_a_disk_that_is_full_is_noticed_before_the_first_one_leaves(
    name: str, room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = ScarceDisk(monkeypatch, room)
    training = going(name, Disk(SharedLink(), tmp_path))
    with same_batch_again(training), pytest.raises(DiskFull):
        training.step(0)
    assert training.host is not None and not training.host.dirty
    training.host.abandon()
    assert not training.optimizer.state
    disk.grow()
    same_bits(undone(training.run(STEPS)), plainly(name))
    assert disk.asked == len(_pieces(training)) + 1, "what there was room for is not taken twice"


def _pieces(training: Training) -> list[range]:
    """Of the parameters that are trained."""
    trained = [p for p in training.model.parameters() if p.requires_grad]
    return [one for parameter in trained for one in cuts_of(parameter, 4, 1024)]


def test_a_host_without_room_for_the_buffers_says_so_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = plain(RECIPES["clipped"], 2)
    link = SharedLink()
    tiny = HostLimits(memory=100, memory_limit="a small machine", lockable=None)
    with monkeypatch.context() as patch:
        patch.setattr(limits, "host_limits", lambda *_: tiny)
        with pytest.raises(HostMemoryFull, match="buffers before the disk"):
            training.go_to_host(
                link, disk=Disk(link, tmp_path), keep_gradients=0, gradients_to_disk=True
            )
    training.host = None
    same_bits(training.run(2), plain(RECIPES["clipped"], 4))


class Broken:
    """From now on a disk gives back other bytes than were written, or none."""

    def __init__(self, patch: pytest.MonkeyPatch, how: str) -> None:
        self.works = False
        read, write = ScratchFile.read, ScratchFile.write

        def broken_read(file: ScratchFile, offset: int, calls: Any) -> None:
            if not self.works and how == "fails to read":
                raise OSError(5, "Input/output error")
            read(file, offset, calls)
            if not self.works and how == "flips a bit":
                calls[0][0] ^= 1

        def broken_write(file: ScratchFile, offset: int, calls: Any) -> None:
            if not self.works and how == "fails to write":
                raise OSError(5, "Input/output error")
            if not self.works and how == "fills up":
                raise OSError(28, "No space left on device")
            write(file, offset, calls)

        patch.setattr(ScratchFile, "read", broken_read)
        patch.setattr(ScratchFile, "write", broken_write)


WAYS_TO_BREAK = {
    "flips a bit": DiskDamaged,
    "fails to read": DiskDamaged,
    "fails to write": DiskDamaged,
    "fills up": DiskFull,
}


@pytest.mark.parametrize("how", WAYS_TO_BREAK)
def test_a_broken_disk_between_micro_batches_takes_the_step_back(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = going("in four parts", Disk(InstantLink(), tmp_path, most=2)).run(3)
    broken = Broken(monkeypatch, how)
    with same_batch_again(training), pytest.raises(WAYS_TO_BREAK[how]):
        training.step(3)
    assert training.host is not None and not training.host.dirty
    broken.works = True
    same_bits(undone(training.run(STEPS - 3)), plainly("in four parts"))


@pytest.mark.parametrize("how", WAYS_TO_BREAK)
def test_a_broken_disk_is_never_stepped_with(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Small()
    training = going("clipped", Disk(link, tmp_path, most=2)).run(3)
    Broken(monkeypatch, how)
    with pytest.raises(WAYS_TO_BREAK[how]):
        training.run(1)
    assert training.host is not None and training.host.dirty
    with pytest.raises(BadInput, match="broke off halfway"):
        training.step(4)
    undone(training)  # with what there is: a gradient is nobody's weight
    gc.collect()  # the errors, whose frames hold buffers
    assert not link.live and not list(tmp_path.iterdir())
    before, after = (plain(RECIPES["clipped"], steps).weights() for steps in (3, 4))
    for name, value in training.weights().items():
        stepped = [value.flatten() == one[name].flatten() for one in (before, after)]
        assert (stepped[0] | stepped[1]).all(), name


def test_one_that_was_damaged_and_dropped_is_nobodys_concern(tmp_path: Path) -> None:
    disk = Disk(InstantLink(), tmp_path, most=2)
    training = going("in four parts", disk).run(3)
    assert training.host is not None
    fail_once(training.model)
    with same_batch_again(training), pytest.raises(RuntimeError, match="in the middle"):
        training.step(3)
    for place in disk.opened[0]._disk._slots:
        if place.last_write is not None:
            place.last_write.checksums = [value ^ 1 for value in place.last_write.checksums]
    same_bits(undone(training.run(STEPS - 3)), plainly("in four parts"))


@pytest.mark.parametrize("tensors", [3, 4, 5, 6])
def test_memory_that_runs_out_while_they_come_can_be_made_good(
    tensors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is under way: some of its gradients are on their way back."""
    training = going("clipped", Disk(SharedLink(), tmp_path))
    for step in range(3):
        training.step(step)
    with (
        same_batch_again(training),
        little_room(monkeypatch, tensors),
        pytest.raises(torch.OutOfMemoryError),
    ):
        training.step(3)
    assert training.host is not None and not training.host.dirty
    training.host.abandon()
    training.host.settle()
    same_bits(undone(training.run(STEPS - 3)), plainly("clipped"))


# -- how they go -----------------------------------------------------------------------------------


def test_each_goes_there_once_a_step_and_once_more_with_each_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    puts: list[int] = []
    real = NumberedDiskStore.put

    def put(store: NumberedDiskStore, slot: int, source: torch.Tensor) -> Any:
        puts.append(source.nbytes)
        return real(store, slot, source)

    monkeypatch.setattr(NumberedDiskStore, "put", put)

    def sent(recipe: Recipe) -> int:
        puts.clear()
        training = Training(recipe=dataclasses.replace(recipe))
        disk = Disk(SharedLink(), tmp_path)
        training.go_to_host(disk.link, disk=disk, keep_gradients=0, gradients_to_disk=True)
        undone(training.run(1))
        return sum(puts)

    used = [p for n, p in Net().named_parameters() if p.requires_grad and "sometimes" not in n]
    once = 4 * sum(p.numel() for p in used)
    assert sent(Recipe()) == 0, "stepped inside backward, none leaves"
    assert sent(Recipe(clip_norm=0.3)) == once
    assert sent(Recipe(parts=4)) == 3 * once
    assert sent(Recipe(parts=4, clip_norm=0.3)) == 4 * once
