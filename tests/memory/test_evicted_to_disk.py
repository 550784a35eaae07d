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
from oomph.memory import evicted_to_disk as parked_on_disk
from oomph.memory.disk_store import NumberedDiskStore
from oomph.memory.evicted import Evicted
from oomph.memory.evicted_to_disk import DiskEvictionStore

PIECE, BUFFERS = 4096, 3


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parked_on_disk, "PIECE", PIECE)
    monkeypatch.setattr(parked_on_disk, "BUFFERS", BUFFERS)


class Slots(NumberedDiskStore):
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

        def open_store(largest: int, buffers: int) -> Slots:
            self.opened.append(Slots(self.link, folder, largest, buffers))
            return self.opened[-1]

        self.parking = DiskEvictionStore(open_store)

    @property
    def slots(self) -> Slots:
        return self.opened[0]

    def evict(self, tensor: Tensor, position: object = 0) -> Evicted:
        evicted = self.parking.evict(tensor, position)
        evicted.want()
        return evicted


def disk_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("oomph-disk")]


def numbers(count: int) -> Tensor:
    return torch.arange(float(count))


@pytest.mark.parametrize("eager", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("count", [1, 1000, 1024, 1025, 5000])
def test_any_size_comes_back_whole(count: int, eager: float, tmp_path: Path) -> None:
    parks = Parks(tmp_path, eager=eager)
    evicted = parks.evict(numbers(count)[:1])
    evicted.leave()
    evicted.fetch()
    assert torch.equal(evicted.take(first=True), numbers(count))
    assert sum(parks.slots.sizes) == 4 * count
    assert max(parks.slots.sizes) <= PIECE
    del evicted
    parks.parking.clear()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.complex64])
def test_so_does_any_type(dtype: torch.dtype, tmp_path: Path) -> None:
    parks = Parks(tmp_path)
    memory = (torch.arange(9001) % 2).to(dtype)
    evicted = parks.evict(memory.clone())
    evicted.leave()
    assert torch.equal(evicted.take(first=True), memory)
    del evicted
    parks.parking.clear()


def test_it_is_not_here_between_leaving_and_coming_back(tmp_path: Path) -> None:
    parks = Parks(tmp_path)
    memory = numbers(3000)
    gone = weakref.ref(memory.untyped_storage())
    with parks.link.lock:  # the disk's own thread cannot be the one that waits
        evicted = parks.evict(memory)
        del memory
        assert gone() is not None, "the copy is under way"
        evicted.leave()
        assert gone() is None
    assert torch.equal(evicted.take(first=True), numbers(3000))
    del evicted
    parks.parking.clear()


def test_room_on_the_disk_grows_by_what_is_missing_and_is_used_again(tmp_path: Path) -> None:
    parks = Parks(tmp_path)
    for count in (2500, 10, 3000, 2500, 3000):
        evicted = parks.evict(numbers(count))
        evicted.leave()
        assert torch.equal(evicted.take(first=True), numbers(count))
        del evicted
    assert sum(parks.slots.sizes) == 4 * 3000
    parks.parking.clear()


def test_what_is_still_wanted_keeps_its_place(tmp_path: Path) -> None:
    parks = Parks(tmp_path)
    both = [parks.evict(numbers(2000) + more) for more in (0, 1)]
    for more, evicted in enumerate(both):
        evicted.leave()
        assert torch.equal(evicted.take(first=True), numbers(2000) + more)
    assert sum(parks.slots.sizes) == 2 * 4 * 2000
    del both, evicted
    parks.parking.clear()


def test_host_memory_is_the_buffers_however_much_is_parked(tmp_path: Path) -> None:
    parks = Parks(tmp_path)
    every = [parks.evict(numbers(3000) + at, at) for at in range(20)]
    for evicted in every:
        evicted.leave()
    assert sum(parks.link.live.values()) == BUFFERS * PIECE
    for at, evicted in reversed(list(enumerate(every))):
        assert torch.equal(evicted.take(first=True), numbers(3000) + at)
    del every, evicted
    parks.parking.clear()


def test_the_disk_is_told_what_comes_next_once_however_often_it_is_wanted(tmp_path: Path) -> None:
    parks = Parks(tmp_path)
    for _ in range(2):
        parks.parking.expect([])
        first, second, third = every = [parks.evict(numbers(1500), at) for at in range(3)]
        for evicted in every:
            evicted.leave()
        parks.parking.expect([third, first, third, second])
        del first, second, third, every, evicted
    assert parks.slots.announced == [[], [4, 5, 0, 1, 2, 3]] * 2
    parks.parking.clear()


def test_clearing_gives_the_host_memory_and_the_room_back(tmp_path: Path) -> None:
    parks = Parks(tmp_path)
    evicted = parks.evict(numbers(3000))
    parks.opened.clear()
    evicted.leave()
    parks.parking.clear()
    assert torch.equal(evicted.take(first=True), numbers(3000)), "what is parked is still there"
    del evicted
    gc.collect()
    assert eventually(lambda: not parks.link.live and not disk_threads())
    assert not list(tmp_path.iterdir())


def test_clearing_with_nothing_parked_leaves_no_thread(tmp_path: Path) -> None:
    parks = Parks(tmp_path)
    evicted = parks.evict(numbers(3000))
    evicted.leave()
    evicted.take(first=True)
    del evicted
    parks.parking.clear()
    assert not disk_threads()


# -- what may go wrong -----------------------------------------------------------------------------


def test_a_full_disk_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = ScarceDisk(monkeypatch, 1)
    parks = Parks(tmp_path)
    memory = numbers(3000)
    with pytest.raises(DiskFull):
        parks.evict(memory)
    assert parks.link.bytes["out"] == 0, "nothing leaves before there is room for all of it"
    disk.grow()
    evicted = parks.evict(memory)
    evicted.leave()
    assert torch.equal(evicted.take(first=True), memory)
    assert sum(parks.slots.sizes) == 4 * 3000, "the piece that there was room for is used"
    del evicted
    parks.parking.clear()


def flip(slots: Slots, slot: int) -> None:
    """As if a bit flipped on the disk; done twice, all is well again."""
    write = slots._disk._slots[slot].last_write
    assert write is not None
    write.checksums = [value ^ 1 for value in write.checksums]


def test_what_the_disk_spoiled_is_an_error_and_never_seen(tmp_path: Path) -> None:
    parks = Parks(tmp_path)
    evicted, other = parks.evict(numbers(3000)), parks.evict(numbers(9000), 1)
    for one in (evicted, other):
        one.leave()  # the other one through all of the buffers
    other.take(first=True)
    flip(parks.slots, 0)
    gone = []
    for first in (True, False):
        with pytest.raises(DiskDamaged, match="other bytes came back"):
            evicted.take(first=first)
        gone.append(evicted._here is None)
    assert gone == [True, True]
    flip(parks.slots, 0)
    assert torch.equal(evicted.take(first=False), numbers(3000)), "it can be read again"
    del evicted, other, one
    parks.parking.clear()


def test_what_nobody_wants_any_more_complains_to_nobody(tmp_path: Path) -> None:
    parks = Parks(tmp_path)
    evicted, other = parks.evict(numbers(3000)), parks.evict(numbers(9000), 1)
    for one in (evicted, other):
        one.leave()
    other.take(first=True)
    flip(parks.slots, 0)
    evicted.fetch()
    evicted.unwant()
    del evicted, other, one
    parks.parking.clear()


def test_what_nobody_wants_any_more_is_dropped_while_the_disk_still_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parks = Parks(tmp_path)
    evicted, other = parks.evict(numbers(900)), parks.evict(numbers(9000), 1)
    for one in (evicted, other):
        one.leave()  # the other one through all of the buffers
    other.take(first=True)
    goes_on, read = threading.Event(), os.preadv

    def late(*how: Any) -> int:
        goes_on.wait()
        return read(*how)

    monkeypatch.setattr(os, "preadv", late)
    evicted.fetch()
    assert evicted._here is not None
    coming = weakref.ref(evicted._here.untyped_storage())
    assert waits_for_nobody(evicted.unwant)
    assert coming() is None
    goes_on.set()
    again = parks.evict(numbers(9000) + 1, 2)  # its pieces go through the buffer of the other
    again.leave()
    assert torch.equal(again.take(first=True), numbers(9000) + 1)
    assert torch.equal(evicted.take(first=False), numbers(900)), "whoever asks again has it fetched"
    del evicted, other, one, again
    parks.parking.clear()
