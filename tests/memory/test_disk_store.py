"""Slots, in memory and on the disk: what was put comes back, or an error."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from deferred_link import DeferredLink, poison
from memory_slots import MemorySlots
from shared_link import SharedLink
from torch import Tensor

from oomph.errors import DiskDamaged, DiskFull, HostMemoryFull
from oomph.memory.disk_store import NumberedDiskStore
from oomph.memory.link import Copy, InstantLink
from oomph.memory.numbered_store import NumberedStore

LARGEST = 50_000


def in_memory(link: DeferredLink, folder: Path) -> NumberedStore:
    return MemorySlots(link)


def on_disk(link: DeferredLink, folder: Path) -> NumberedStore:
    return NumberedDiskStore(link, folder, largest=LARGEST, buffers=3)


def on_disk_with_the_smallest_ring(link: DeferredLink, folder: Path) -> NumberedStore:
    return NumberedDiskStore(link, folder, largest=LARGEST, buffers=2)


every_store = pytest.mark.parametrize(
    "make", [in_memory, on_disk, on_disk_with_the_smallest_ring], ids=lambda make: make.__name__
)
Make = Callable[[DeferredLink, Path], NumberedStore]


@every_store
@pytest.mark.parametrize("eager", [0.0, 0.5])
def test_streamed_state_is_what_it_would_be_without_streaming(
    make: Make, eager: float, tmp_path: Path
) -> None:
    """Fetch a bucket, step, write it back, the next one on its way: the pattern of the docs."""
    store = make(SharedLink(eager=eager), tmp_path)
    expected = [torch.randn(1000 + index) for index in range(7)]
    slots = [store.slot(bucket.nbytes) for bucket in expected]
    for slot, bucket in zip(slots, expected, strict=True):
        store.put(slot, bucket.clone()).finish()
    gpu = [torch.empty(2000), torch.empty(2000)]
    for step in range(4):
        store.announce(slots)
        leaving: list[Copy | None] = [None, None]
        coming: Copy | None = store.get(slots[0], gpu[0][: expected[0].numel()])
        for index, slot in enumerate(slots):
            here, there = index % 2, (index + 1) % 2
            following = None
            if index + 1 < len(slots):
                if (left := leaving[there]) is not None:
                    left.wait()
                following = store.get(slots[index + 1], gpu[there][: expected[index + 1].numel()])
            assert coming is not None
            coming.wait()
            bucket = gpu[here][: expected[index].numel()]
            assert torch.equal(bucket, expected[index])
            bucket.mul_(1.5).add_(step)
            expected[index].mul_(1.5).add_(step)
            leaving[here] = store.put(slot, bucket)
            coming = following
        for left in leaving:
            assert left is not None
            left.wait()
    store.close()


@every_store
@pytest.mark.parametrize("eager", [0.0, 0.5])
def test_activations_come_back_in_reverse_order(make: Make, eager: float, tmp_path: Path) -> None:
    store = make(SharedLink(eager=eager), tmp_path)
    slots = [store.slot(LARGEST) for _ in range(9)]
    for _ in range(3):
        saved, leaving = [], []
        for slot in slots:
            activation = torch.randn(3, 100, dtype=torch.bfloat16)
            saved.append(activation.clone())
            leaving.append(store.put(slot, activation))
            if len(leaving) > 1:
                leaving.pop(0).wait()
            del activation
        leaving.pop().wait()
        store.announce(slots[::-1])
        for slot, expected in zip(slots[::-1], saved[::-1], strict=True):
            target = torch.empty_like(expected)
            store.get(slot, target).wait()
            assert torch.equal(target, expected)
    store.close()


@every_store
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_puts_and_gets_gives_what_was_put_last(
    make: Make, seed: int, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    store = make(SharedLink(eager=chance.choice([0.0, 0.3, 0.9]), seed=seed), tmp_path)
    sizes = [chance.choice([1, 300, LARGEST // 4]) for _ in range(10)]
    slots = [store.slot(4 * size) for size in sizes]
    last: dict[int, Tensor] = {}
    puts: list[tuple[Copy, Tensor]] = []
    gets: list[tuple[Copy, Tensor, Tensor]] = []

    def settle(count: int) -> None:
        for _ in range(min(count, len(puts))):
            put, source = puts.pop(chance.randrange(len(puts)))
            put.wait()
            poison(source)
        for _ in range(min(count, len(gets))):
            get, target, expected = gets.pop(chance.randrange(len(gets)))
            get.wait()
            assert torch.equal(target, expected)

    for number in range(250):
        index = chance.randrange(len(slots))
        if index not in last or chance.random() < 0.4:
            last[index] = torch.full((sizes[index],), float(number))
            source = last[index].clone()
            puts.append((store.put(slots[index], source), source))
        else:
            target = torch.empty(sizes[index])
            gets.append((store.get(slots[index], target), target, last[index]))
        if chance.random() < 0.2:
            store.announce([slots[i] for i in chance.sample(sorted(last), len(last))])
        if chance.random() < 0.4:
            settle(chance.randrange(3))
    settle(250)
    store.close()


def test_host_memory_is_the_ring_however_many_slots_there_are(tmp_path: Path) -> None:
    link = SharedLink()
    store = NumberedDiskStore(link, tmp_path, largest=1000, buffers=3)
    for number in range(40):
        store.put(store.slot(1000), torch.full((1000,), number, dtype=torch.uint8)).wait()
    assert link.taken == 3000
    store.close()


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    real, reads = os.preadv, []

    def counted(file: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(offset)
        return real(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    return reads


def test_what_was_put_a_moment_ago_is_not_read_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = count_reads(monkeypatch)
    store = NumberedDiskStore(InstantLink(), tmp_path, largest=100, buffers=2)
    slots = [store.slot(100) for _ in range(3)]
    for slot in slots:
        store.put(slot, torch.full((100,), slot, dtype=torch.uint8)).finish()
    target = torch.empty(100, dtype=torch.uint8)
    store.get(slots[2], target).finish()
    assert not reads
    store.get(slots[0], target).finish()
    assert len(reads) == 1
    store.close()


def test_what_is_still_on_its_way_to_a_buffer_is_waited_for(tmp_path: Path) -> None:
    link = SharedLink()
    store = NumberedDiskStore(link, tmp_path, largest=100, buffers=2)
    source, target = torch.arange(100, dtype=torch.uint8), torch.empty(100, dtype=torch.uint8)
    with link.lock:  # so that the disk's thread cannot be the one that waits
        put = store.put(store.slot(100), source)
        store.get(0, target).wait()
        assert torch.equal(target, source)
    put.finish()
    store.close()


def test_what_was_announced_is_read_before_it_is_got_but_for_one_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = NumberedDiskStore(InstantLink(), tmp_path, largest=100, buffers=4)
    slots = [store.slot(100) for _ in range(9)]
    for slot in slots:
        store.put(slot, torch.full((100,), slot, dtype=torch.uint8)).finish()
    reads = count_reads(monkeypatch)
    store.announce(slots[:4])
    for copy in [copy for buffer in store._ring for copy in buffer.on_disk]:
        copy.finish()
    assert len(reads) == 3
    target = torch.empty(100, dtype=torch.uint8)
    store.get(slots[1], target).finish()
    assert target[0] == slots[1]
    store.put(slots[8], target).finish()
    store.close()
    assert len(reads) <= 4


@every_store
def test_copies_let_go_of_the_gpus_memory_once_they_were_waited_for(
    make: Make, tmp_path: Path
) -> None:
    store = make(SharedLink(), tmp_path)
    slot = store.slot(400)
    source, target = torch.ones(100), torch.empty(100)
    held = [weakref.ref(tensor.untyped_storage()) for tensor in (source, target)]
    put = store.put(slot, source)
    del source
    assert held[0]() is not None
    put.wait()
    get = store.get(slot, target)
    get.wait()
    del target
    gc.collect()
    # A thread of the store may be about to return from the same copy.
    until = time.monotonic() + 5
    while any(ref() is not None for ref in held) and time.monotonic() < until:
        time.sleep(0.01)
    assert [ref() for ref in held] == [None, None]
    store.close()


# --- Faults ---------------------------------------------------------------------------------------


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    def call(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, DiskFull), (errno.EIO, DiskDamaged)])
def test_what_the_disk_could_not_take_is_never_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    store = NumberedDiskStore(SharedLink(), tmp_path, largest=100, buffers=2)
    slots = [store.slot(100) for _ in range(4)]
    content = torch.arange(100, dtype=torch.uint8)
    with monkeypatch.context() as patched:
        refuse(patched, "pwritev", number)
        with pytest.raises(error):
            store.put(slots[0], content).finish()
    for slot in slots[1:]:
        store.put(slot, content + slot).wait()
    target = torch.zeros(100, dtype=torch.uint8)
    for _ in range(2):
        with pytest.raises(error):
            store.get(slots[0], target).wait()
    for slot in slots[1:]:
        store.get(slot, target).wait()
        assert torch.equal(target, content + slot)
    store.put(slots[0], content).wait()
    store.get(slots[0], target).wait()
    assert torch.equal(target, content)
    store.close()


def test_a_read_error_is_raised_by_its_own_get_and_by_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = NumberedDiskStore(SharedLink(), tmp_path, largest=100, buffers=2)
    slots = [store.slot(100) for _ in range(4)]
    for slot in slots:
        store.put(slot, torch.full((100,), slot, dtype=torch.uint8)).finish()
    with monkeypatch.context() as patched:
        refuse(patched, "preadv", errno.EIO)
        store.announce([slots[0]])
        failed = store.get(slots[0], torch.empty(100, dtype=torch.uint8))
        with pytest.raises(DiskDamaged):
            failed.wait()
    target = torch.empty(100, dtype=torch.uint8)
    for slot in slots[1:]:
        store.put(slot, torch.full((100,), slot + 1, dtype=torch.uint8)).wait()
        store.get(slot, target).wait()
        assert (target == slot + 1).all()
    with pytest.raises(DiskDamaged):
        failed.finish()
    store.close()


@pytest.mark.parametrize("announced", [False, True])
def test_what_could_not_be_read_is_read_again(
    announced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = NumberedDiskStore(SharedLink(), tmp_path, largest=100, buffers=3)
    slots = [store.slot(100) for _ in range(4)]
    for slot in slots:
        store.put(slot, torch.full((100,), slot, dtype=torch.uint8)).finish()
    target = torch.empty(100, dtype=torch.uint8)
    with monkeypatch.context() as patched:
        refuse(patched, "preadv", errno.EIO)
        for _ in range(2):
            with pytest.raises(DiskDamaged):
                store.get(slots[0], target).wait()
    if announced:
        store.announce(slots)
    for slot in slots:
        store.get(slot, target).wait()
        assert (target == slot).all()
    store.close()


def test_a_ring_that_host_memory_cannot_hold_is_refused_before_it_is_made(tmp_path: Path) -> None:
    link = SharedLink()
    with pytest.raises(HostMemoryFull, match="the ring of buffers before the disk needs") as caught:
        NumberedDiskStore(link, tmp_path, largest=1 << 58)
    assert caught.value.missing > 0
    assert link.taken == 0


def test_closing_with_everything_under_way_leaves_nothing(tmp_path: Path) -> None:
    link = SharedLink()
    store = NumberedDiskStore(link, tmp_path, largest=LARGEST, buffers=3)
    slots = [store.slot(LARGEST) for _ in range(6)]
    ring = [weakref.ref(buffer.memory.untyped_storage()) for buffer in store._ring]
    copies = [store.put(slot, torch.ones(LARGEST, dtype=torch.uint8)) for slot in slots]
    copies += [store.get(slot, torch.empty(LARGEST, dtype=torch.uint8)) for slot in slots[:4]]
    store.announce(slots)
    store.close()
    link.close()
    del copies, store
    gc.collect()
    assert not [thread.name for thread in threading.enumerate() if "oomph-disk" in thread.name]
    assert not list(tmp_path.iterdir())
    assert [ref() for ref in ring] == [None] * 3


def test_an_error_that_was_raised_holds_nothing_of_whoever_heard_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = NumberedDiskStore(SharedLink(), tmp_path, largest=100, buffers=2)
    slots = [store.slot(100) for _ in range(3)]
    for slot in slots:
        store.put(slot, torch.full((100,), slot, dtype=torch.uint8)).finish()

    def listen() -> list[weakref.ref[object]]:
        activation, target = torch.ones(100), torch.empty(100, dtype=torch.uint8)
        with monkeypatch.context() as patched:
            refuse(patched, "preadv", errno.EIO)
            try:
                store.get(slots[0], target).wait()
            except DiskDamaged as error:
                assert error.slot == slots[0]
        return [weakref.ref(tensor.untyped_storage()) for tensor in (activation, target)]

    profiles = listen()
    gc.collect()
    assert [held() for held in profiles] == [None, None]
    store.close()
