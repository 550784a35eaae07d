"""An optimizer whose state is on the disk trains as the plain one does, to the bit."""

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
from memory_slots import MemorySlots
from scarce_disk import ScarceDisk
from shared_link import SharedLink

from oomph.errors import BadInput, DiskDamaged, DiskFull, HostMemoryFull
from oomph.memory import limits
from oomph.memory.limits import HostLimits
from oomph.memory.link import InstantLink, Link
from oomph.memory.numbered_store import OpenStore
from oomph.techniques import disk_state
from oomph.techniques.disk_state import choose_for_disk
from oomph.techniques.watched_tensors import own_work

STEPS = 7

RECIPES = {
    "plain": Recipe(),
    "clipped": Recipe(clip_norm=0.3),
    "in parts, clipped": Recipe(parts=2, clip_norm=0.3),
    "scheduled": Recipe(schedule=warm_up),
    "bf16, clipped": Recipe(dtype=torch.bfloat16, clip_norm=0.3),
    "scaled": Recipe(scaler=overflowing),
    "momentum": Recipe(
        make_optimizer=lambda model: torch.optim.SGD(two_groups(model), lr=1e-2, momentum=0.9)
    ),
    "amsgrad": Recipe(
        make_optimizer=lambda model: torch.optim.AdamW(two_groups(model), lr=1e-2, amsgrad=True)
    ),
    "no state": Recipe(make_optimizer=lambda model: torch.optim.SGD(two_groups(model), lr=1e-2)),
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


@pytest.mark.parametrize("name", RECIPES)
def test_steps_have_the_plain_bits(name: str, tmp_path: Path) -> None:
    same_bits(undone(on_disk(name, tmp_path)), plainly(name))


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_some_of_the_state_may_stay_in_memory(share: float, tmp_path: Path) -> None:
    same_bits(undone(on_disk("plain", tmp_path, disk_share=share)), plainly("plain"))


def test_the_host_steps_what_is_in_its_memory(tmp_path: Path) -> None:
    trained = on_disk("clipped", tmp_path, disk_share=0.4, host_share=0.3)
    nearly(undone(trained), plainly("clipped"))


@pytest.mark.parametrize(("eager", "seed"), [(0.0, 0), (0.3, 1), (0.6, 2), (1.0, 3)])
@pytest.mark.parametrize("buffers", [2, 100])
def test_whenever_copies_happen(eager: float, seed: int, buffers: int, tmp_path: Path) -> None:
    link = SharedLink(eager=eager, seed=seed)
    training = Training(recipe=RECIPES["in parts, clipped"])
    disk = Disk(link, tmp_path, most=buffers)
    training.go_to_host(link, disk=disk, disk_share=0.7, bucket=3000, early=3)
    same_bits(undone(training.run(STEPS)), plainly("in parts, clipped"))


def test_over_a_hundred_steps(tmp_path: Path) -> None:
    trained = on_disk("bf16, clipped", tmp_path, InstantLink(), 100, bucket=3000)
    same_bits(undone(trained), plainly("bf16, clipped", 100))


def test_only_what_is_under_way_takes_host_memory(tmp_path: Path) -> None:
    class Small(CountingLink, SharedLink):
        pass

    def taken(share: float) -> int:
        link = Small()
        training = Training(recipe=RECIPES["plain"])
        disk = Disk(link, tmp_path, most=2)
        training.go_to_host(link, disk=disk, disk_share=share, bucket=2000)
        training.run(2)
        held = sum(link.live.values())
        undone(training)
        return held

    assert taken(1.0) < taken(0.0) / 2


def test_a_state_dict_has_the_numbers_and_the_next_step_goes_on(tmp_path: Path) -> None:
    ours = on_disk("clipped", tmp_path, steps=3)
    theirs = plain(RECIPES["clipped"], 3)
    saved = copy.deepcopy(ours.optimizer.state_dict())
    _same_state(saved, theirs.optimizer.state_dict())
    same_bits(undone(ours.run(STEPS - 3)), plainly("clipped"))


def test_between_two_steps_the_optimizer_shows_stand_ins_only(tmp_path: Path) -> None:
    ours = on_disk("plain", tmp_path, steps=2)
    with own_work():  # whoever looks otherwise is shown the numbers
        stored = sum(
            value.untyped_storage().nbytes()
            for state in ours.optimizer.state.values()
            for value in state.values()
            if value.dim()
        )
    assert stored < 1000
    undone(ours)


def test_stand_ins_can_be_read_one_by_one(tmp_path: Path) -> None:
    ours, theirs = on_disk("clipped", tmp_path, steps=3), plain(RECIPES["clipped"], 3)
    assert ours.host is not None
    with ours.host.state_left_on_disk():
        state = ours.optimizer.state_dict()
    for number, own in state["state"].items():
        state["state"][number] = {name: ours.host.numbers(value) for name, value in own.items()}
    _same_state(state, theirs.optimizer.state_dict())
    undone(ours)


def test_what_is_written_to_the_state_that_is_shown_counts(tmp_path: Path) -> None:
    ours, theirs = on_disk("plain", tmp_path, steps=3), plain(RECIPES["plain"], 3)
    for training in (ours, theirs):
        training.optimizer.state_dict()
        for state in training.optimizer.state.values():
            state["exp_avg"].mul_(0.5)
    ours.run(2)
    theirs.run(2)
    same_bits(undone(ours), theirs)


@pytest.mark.parametrize("before", [0, 2])
def test_a_plain_state_dict_can_be_loaded(before: int, tmp_path: Path) -> None:
    theirs = plain(RECIPES["clipped"], 4)
    ours = on_disk("clipped", tmp_path, steps=before)
    ours.go_on_from(theirs)
    same_bits(undone(ours.run(2)), theirs.run(2))


def test_state_that_is_there_already_goes_to_the_disk(tmp_path: Path) -> None:
    training = plain(RECIPES["plain"], 3)
    link = SharedLink()
    training.go_to_host(link, disk=Disk(link, tmp_path), disk_share=1.0)
    same_bits(undone(training.run(STEPS - 3)), plainly("plain"))


def test_undo_closes_the_disk(tmp_path: Path) -> None:
    link = SharedLink()
    disk = Disk(link, tmp_path)
    training = Training(recipe=RECIPES["plain"])
    training.go_to_host(link, disk=disk, disk_share=1.0)
    undone(training.run(2))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(AssertionError, match="closed"):
        disk.opened[0]._disk.write(0, torch.zeros(1, dtype=torch.uint8))


def test_a_failed_backward_leaves_nothing_behind(tmp_path: Path) -> None:
    trained = on_disk("clipped", tmp_path, steps=3)
    fail_once(trained.model)
    with same_batch_again(trained), pytest.raises(RuntimeError, match="in the middle"):
        trained.step(3)
    same_bits(undone(trained.run(STEPS - 3)), plainly("clipped"))


def test_a_step_that_broke_off_can_be_undone(tmp_path: Path) -> None:
    link = SharedLink()
    training = Training(recipe=RECIPES["plain"])
    host = training.go_to_host(link, disk=Disk(link, tmp_path), disk_share=1.0)
    fail_once(training.model)
    with pytest.raises(RuntimeError, match="in the middle"):
        training.step(0)
    assert host.dirty
    undone(training)
    state = training.optimizer.state_dict()["state"].values()
    assert all(value.isfinite().all() for own in state for value in own.values())


# -- what may go wrong -----------------------------------------------------------------------------


def test_a_full_disk_is_noticed_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ScarceDisk(monkeypatch, 3)
    training = plain(RECIPES["plain"], 2)
    link = SharedLink()
    with pytest.raises(DiskFull):
        training.go_to_host(link, disk=Disk(link, tmp_path), disk_share=1.0)
    training.host = None
    same_bits(training.run(2), plain(RECIPES["plain"], 4))


def test_a_bit_that_flips_on_the_disk_is_never_stepped_with(tmp_path: Path) -> None:
    link = InstantLink()
    disk = Disk(link, tmp_path, most=2)
    training = Training(recipe=RECIPES["plain"])
    training.go_to_host(link, disk=disk, disk_share=1.0)
    training.run(2)
    place = disk.opened[0]._disk._slots[0]
    assert place.last_write is not None
    place.last_write.checksums = [value ^ 1 for value in place.last_write.checksums]
    with pytest.raises(DiskDamaged, match="other bytes came back"):
        for _ in range(2):  # its buffer may hold what was written
            training.run(1)
    assert training.host is not None
    place.last_write.checksums = [value ^ 1 for value in place.last_write.checksums]
    undone(training)


def test_a_host_too_small_to_show_all_says_so_and_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = on_disk("plain", tmp_path, steps=3)
    tiny = HostLimits(memory=100, memory_limit="a small machine", lockable=None)
    with monkeypatch.context() as patch:
        patch.setattr(limits, "host_limits", lambda *_: tiny)
        with pytest.raises(HostMemoryFull, match="on the disk"):
            ours.optimizer.state_dict()
    same_bits(undone(ours.run(STEPS - 3)), plainly("plain"))


def test_an_optimizer_of_whole_matrices_cannot_go(tmp_path: Path) -> None:
    training = Training(
        recipe=Recipe(make_optimizer=lambda m: torch.optim.Adafactor(two_groups(m)))
    )
    link = InstantLink()
    with pytest.raises(BadInput, match="Adafactor"):
        training.go_to_host(link, disk=Disk(link, tmp_path), disk_share=0.5)
    training.host = None


# -- who goes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_the_share_is_met_and_spread_over_the_model(share: float) -> None:
    training = Training(recipe=RECIPES["plain"])
    host = training.go_to_host(InstantLink())
    parameters = host._trained * 8
    sizes = [one.leaf.numel() for one in parameters]
    chosen = choose_for_disk(parameters, share)
    assert sum(one.leaf.numel() for one in chosen) == pytest.approx(
        share * sum(sizes), abs=max(sizes)
    )
    half = len(parameters) // 2
    first = choose_for_disk(parameters[:half], share)
    assert sum(one.leaf.numel() for one in first) == pytest.approx(
        share * sum(sizes[:half]), abs=max(sizes)
    )
    undone(training)


def test_small_parameters_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(recipe=RECIPES["plain"])
    host = training.go_to_host(InstantLink())
    largest = max(one.leaf.nbytes for one in host._trained)
    monkeypatch.setattr(disk_state, "LEAST", largest)
    chosen = choose_for_disk(host._trained, 1.0)
    assert {one.leaf.nbytes for one in chosen} == {largest}
    undone(training)


def test_slots_in_memory_do_as_well() -> None:
    link = SharedLink()
    training = Training(recipe=RECIPES["plain"])
    open_store: OpenStore = lambda *_: MemorySlots(link)  # noqa: E731
    training.go_to_host(link, disk=open_store, disk_share=1.0)
    same_bits(undone(training.run(STEPS)), plainly("plain"))


def _same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["state"].keys() == other["state"].keys()
    for number, state in other["state"].items():
        for name, value in state.items():
            assert torch.equal(one["state"][number][name].cpu(), value.cpu()), (number, name)
