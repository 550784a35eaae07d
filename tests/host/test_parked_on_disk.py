"""Memory that is parked on the disk comes back as it was, in pieces, through a ring of buffers."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from deferred_link import CountingLink
from patience import eventually, waits_for_nobody
from scarce_disk import ScarceDisk
from shared_link import SharedLink
from torch import Tensor

from oomph.errors import DiskDamaged, DiskFull
from oomph.host import parked_on_disk
from oomph.host.disk_slots import DiskSlots
from oomph.host.parked import Parked
from oomph.host.parked_on_disk import DiskParking

PIECE, BUFFERS = 4096, 3


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parked_on_disk, "PIECE", PIECE)
    monkeypatch.setattr(parked_on_disk, "BUFFERS", BUFFERS)


class Slots(DiskSlots):
    """Remembers what it was told."""

    def __init__(self, link: SharedLink, folder: Path, largest: int, buffers: int) -> None:
        super().__init__(link, folder, largest=largest, buffers=buffers)
        self.sizes: list[int] = []
        self.announced: list[list[int]] = []

    def slot(self, nbytes: int) -> int:
        number = super().slot(nbytes)
        self.sizes.append(nbytes)
        return number

    def announce(self, slots: Sequence[int]) -> None:
        self.announced.append(list(slots))
        super().announce(slots)


class Counting(CountingLink, SharedLink):
    """That the disk's threads may wait for."""


class Parks:
    """A parking, and the slots that it opened."""

    def __init__(self, folder: Path, **how: float) -> None:
        self.link = Counting(**how)
        self.opened: list[Slots] = []

        def open_slots(largest: int, buffers: int) -> Slots:
            self.opened.append(Slots(self.link, folder, largest, buffers))
            return self.opened[-1]

        self.parking = DiskParking(open_slots)

    @property
    def slots(self) -> Slots:
        return self.opened[0]

    def park(self, tensor: Tensor, position: object = 0) -> Parked:
        parked = self.parking.park(tensor, position)
        parked.want()
        return parked


def disk_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("oomph-disk")]


def numbers(count: int) -> Tensor:
    return torch.arange(float(count))


@pytest.mark.parametrize("eager", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("count", [1, 1000, 1024, 1025, 5000])
def test_any_size_comes_back_whole(count: int, eager: float, tmp_path: Path) -> None:
    parks = Parks(tmp_path, eager=eager)
    parked = parks.park(numbers(count)[:1])
    parked.leave()
    parked.fetch()
    assert torch.equal(parked.take(first=True), numbers(count))
    assert sum(parks.slots.sizes) == 4 * count
    assert max(parks.slots.sizes) <= PIECE
    del parked
    parks.parking.clear()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.complex64])
def test_so_does_any_type(dtype: torch.dtype, tmp_path: Path) -> None:
    parks = Parks(tmp_path)
    memory = (torch.arange(9001) % 2).to(dtype)
    parked = parks.park(memory.clone())
    parked.leave()
    assert torch.equal(parked.take(first=True), memory)
    del parked
    parks.parking.clear()


def test_it_is_not_here_between_leaving_and_coming_back(tmp_path: Path) -> None:
    parks = Parks(tmp_path)
    memory = numbers(3000)
    gone = weakref.ref(memory.untyped_storage())
    with parks.link.lock:  # the disk's own thread cannot be the one that waits
        parked = parks.park(memory)
        del memory
        assert gone() is not None, "the copy is under way"
        parked.leave()
        assert gone() is None
    assert torch.equal(parked.take(first=True), numbers(3000))
    del parked
    parks.parking.clear()


def test_room_on_the_disk_grows_by_what_is_missing_and_is_used_again(tmp_path: Path) -> None:
    parks = Parks(tmp_path)
    for count in (2500, 10, 3000, 2500, 3000):
        parked = parks.park(numbers(count))
        parked.leave()
        assert torch.equal(parked.take(first=True), numbers(count))
        del parked
    assert sum(parks.slots.sizes) == 4 * 3000
    parks.parking.clear()


def test_what_is_still_wanted_keeps_its_place(tmp_path: Path) -> None:
    parks = Parks(tmp_path)
    both = [parks.park(numbers(2000) + more) for more in (0, 1)]
    for more, parked in enumerate(both):
        parked.leave()
        assert torch.equal(parked.take(first=True), numbers(2000) + more)
    assert sum(parks.slots.sizes) == 2 * 4 * 2000
    del both, parked
    parks.parking.clear()


def test_host_memory_is_the_buffers_however_much_is_parked(tmp_path: Path) -> None:
    parks = Parks(tmp_path)
    every = [parks.park(numbers(3000) + at, at) for at in range(20)]
    for parked in every:
        parked.leave()
    assert sum(parks.link.live.values()) == BUFFERS * PIECE
    for at, parked in reversed(list(enumerate(every))):
        assert torch.equal(parked.take(first=True), numbers(3000) + at)
    del every, parked
    parks.parking.clear()


def test_the_disk_is_told_what_comes_next_once_however_often_it_is_wanted(tmp_path: Path) -> None:
    parks = Parks(tmp_path)
    for _ in range(2):
        parks.parking.expect([])
        first, second, third = every = [parks.park(numbers(1500), at) for at in range(3)]
        for parked in every:
            parked.leave()
        parks.parking.expect([third, first, third, second])
        del first, second, third, every, parked
    assert parks.slots.announced == [[], [4, 5, 0, 1, 2, 3]] * 2
    parks.parking.clear()


def test_clearing_gives_the_host_memory_and_the_room_back(tmp_path: Path) -> None:
    parks = Parks(tmp_path)
    parked = parks.park(numbers(3000))
    parks.opened.clear()
    parked.leave()
    parks.parking.clear()
    assert torch.equal(parked.take(first=True), numbers(3000)), "what is parked is still there"
    del parked
    gc.collect()
    assert eventually(lambda: not parks.link.live and not disk_threads())
    assert not list(tmp_path.iterdir())


def test_clearing_with_nothing_parked_leaves_no_thread(tmp_path: Path) -> None:
    parks = Parks(tmp_path)
    parked = parks.park(numbers(3000))
    parked.leave()
    parked.take(first=True)
    del parked
    parks.parking.clear()
    assert not disk_threads()


# -- what may go wrong -----------------------------------------------------------------------------


def test_a_full_disk_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = ScarceDisk(monkeypatch, 1)
    parks = Parks(tmp_path)
    memory = numbers(3000)
    with pytest.raises(DiskFull):
        parks.park(memory)
    assert parks.link.bytes["out"] == 0, "nothing leaves before there is room for all of it"
    disk.grow()
    parked = parks.park(memory)
    parked.leave()
    assert torch.equal(parked.take(first=True), memory)
    assert sum(parks.slots.sizes) == 4 * 3000, "the piece that there was room for is used"
    del parked
    parks.parking.clear()


def flip(slots: Slots, slot: int) -> None:
    """As if a bit flipped on the disk; done twice, all is well again."""
    write = slots._disk._slots[slot].last_write
    assert write is not None
    write.checksums = [value ^ 1 for value in write.checksums]


def test_what_the_disk_spoiled_is_an_error_and_never_seen(tmp_path: Path) -> None:
    parks = Parks(tmp_path)
    parked, other = parks.park(numbers(3000)), parks.park(numbers(9000), 1)
    for one in (parked, other):
        one.leave()  # the other one through all of the buffers
    other.take(first=True)
    flip(parks.slots, 0)
    gone = []
    for first in (True, False):
        with pytest.raises(DiskDamaged, match="other bytes came back"):
            parked.take(first=first)
        gone.append(parked._here is None)
    assert gone == [True, True]
    flip(parks.slots, 0)
    assert torch.equal(parked.take(first=False), numbers(3000)), "it can be read again"
    del parked, other, one
    parks.parking.clear()


def test_what_nobody_wants_any_more_complains_to_nobody(tmp_path: Path) -> None:
    parks = Parks(tmp_path)
    parked, other = parks.park(numbers(3000)), parks.park(numbers(9000), 1)
    for one in (parked, other):
        one.leave()
    other.take(first=True)
    flip(parks.slots, 0)
    parked.fetch()
    parked.unwant()
    del parked, other, one
    parks.parking.clear()


def test_what_nobody_wants_any_more_is_dropped_while_the_disk_still_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parks = Parks(tmp_path)
    parked, other = parks.park(numbers(900)), parks.park(numbers(9000), 1)
    for one in (parked, other):
        one.leave()  # the other one through all of the buffers
    other.take(first=True)
    goes_on, read = threading.Event(), os.preadv

    def late(*how: Any) -> int:
        goes_on.wait()
        return read(*how)

    monkeypatch.setattr(os, "preadv", late)
    parked.fetch()
    assert parked._here is not None
    coming = weakref.ref(parked._here.untyped_storage())
    assert waits_for_nobody(parked.unwant)
    assert coming() is None
    goes_on.set()
    again = parks.park(numbers(9000) + 1, 2)  # its pieces go through the buffer of the other
    again.leave()
    assert torch.equal(again.take(first=True), numbers(9000) + 1)
    assert torch.equal(parked.take(first=False), numbers(900)), "whoever asks again has it fetched"
    del parked, other, one, again
    parks.parking.clear()
