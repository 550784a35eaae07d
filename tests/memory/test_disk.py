"""Tensors on the disk: what comes back is what was written, or an error."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from patience import eventually, waits_for_nobody
from torch import Tensor

from oomph.errors import DiskDamaged, DiskFull
from oomph.memory import disk, disk_threads
from oomph.memory.disk import DiskStore
from oomph.memory.scratch_file import ALIGNMENT

#: So small that small tensors have many pieces.
SMALL_PIECE = 2 * ALIGNMENT


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "PIECE", SMALL_PIECE)
    monkeypatch.setattr(disk_threads, "PIECE", SMALL_PIECE)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    store = DiskStore(tmp_path)
    yield store
    store.close()
    assert not threads_of_stores()
    assert not list(tmp_path.iterdir())


def threads_of_stores() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "oomph-disk" in thread.name]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def noise(nbytes: int, seed: int = 0) -> Tensor:
    values = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    return torch.from_numpy(values)


def aligned(nbytes: int) -> Tensor:
    memory = torch.zeros(nbytes + ALIGNMENT, dtype=torch.uint8)
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + nbytes]


def written(store: DiskStore, content: Tensor) -> int:
    slot = store.slot(content.nbytes)
    store.write(slot, content).finish()
    return slot


def comes_back(store: DiskStore, slot: int, content: Tensor) -> bool:
    into = torch.empty_like(content)
    store.read(slot, into).finish()
    return torch.equal(into, content)


# --- What was written comes back ------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(
    "nbytes",
    [0, 1, ALIGNMENT - 1, ALIGNMENT, SMALL_PIECE, SMALL_PIECE + 1, 5 * SMALL_PIECE + ALIGNMENT + 7],
)
def test_any_size_comes_back_to_any_address(store: DiskStore, nbytes: int, offset: int) -> None:
    memory, into = aligned(nbytes + offset)[offset:], aligned(nbytes + offset)[offset:]
    memory.copy_(noise(nbytes))
    slot = store.slot(nbytes)
    store.write(slot, memory)
    store.read(slot, into).finish()
    assert torch.equal(into, memory)


def test_tensors_of_any_type_and_shape_come_back(store: DiskStore) -> None:
    for tensor in (torch.randn(3, 5, 7), torch.tensor(2.5), torch.randn(9).bfloat16()):
        assert comes_back(store, written(store, tensor), tensor)


def test_a_slot_can_hold_less_than_it_has_room_for(store: DiskStore) -> None:
    slot = store.slot(100)
    store.write(slot, noise(60)).finish()
    assert comes_back(store, slot, noise(60))


def test_aligned_memory_is_written_from_and_read_into_without_a_copy(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not store.direct:
        pytest.skip("no direct I/O here")
    memory = aligned(SMALL_PIECE + ALIGNMENT + 3)
    addresses = spied_addresses(monkeypatch)
    slot = store.slot(memory.nbytes)
    store.write(slot, memory).finish()
    store.read(slot, memory).finish()
    begin = memory.data_ptr()
    straight = [address for address in addresses if begin <= address < begin + memory.nbytes]
    assert sorted(straight) == [begin, begin, begin + SMALL_PIECE, begin + SMALL_PIECE]
    assert len(addresses) == 6  # and the broken block of each through a buffer


def spied_addresses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    addresses: list[int] = []

    def spied(real: Callable[..., int]) -> Callable[..., int]:
        def call(file: int, buffers: list[memoryview], offset: int) -> int:
            addresses.extend(np.frombuffer(buffer, np.uint8).ctypes.data for buffer in buffers)
            return real(file, buffers, offset)

        return call

    for name in ("pwritev", "preadv"):
        monkeypatch.setattr(os, name, spied(getattr(os, name)))
    return addresses


def test_without_direct_io_the_same_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    store = DiskStore(tmp_path)
    assert not store.direct
    content = noise(3 * SMALL_PIECE + 5)
    assert comes_back(store, written(store, content), content)
    store.close()


# --- Order ----------------------------------------------------------------------------------------


class HeldBack:
    """A call of the system that does nothing until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.begun, self._release = threading.Event(), threading.Event()
        self.calls = 0
        self._real = getattr(os, name)
        monkeypatch.setattr(os, name, self._call)

    def _call(self, *args: Any) -> int:
        self.calls += 1
        self.begun.set()
        assert self._release.wait(60)
        result: int = self._real(*args)
        return result

    def release(self) -> None:
        self._release.set()


def test_a_write_waits_for_the_reads_before_it(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, other, into = written(store, noise(50)), store.slot(50), noise(50, seed=7)
    reads = HeldBack(monkeypatch, "preadv")
    read = store.read(slot, into)
    reads.begun.wait()
    write = store.write(slot, noise(50, seed=1))
    store.write(other, noise(50)).finish()  # other slots go on
    assert not write.is_done()
    reads.release()
    read.finish()
    write.finish()
    assert torch.equal(into, noise(50))
    assert comes_back(store, slot, noise(50, seed=1))


def test_a_read_waits_for_the_write_before_it(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, other, into = (
        written(store, noise(50)),
        written(store, noise(9)),
        torch.empty_like(noise(50)),
    )
    writes = HeldBack(monkeypatch, "pwritev")
    store.write(slot, noise(50, seed=1))
    read = store.read(slot, into)
    assert comes_back(store, other, noise(9))
    assert not read.is_done()
    writes.release()
    read.finish()
    assert torch.equal(into, noise(50, seed=1))


class Filling:
    """A copy of the GPU's that fills memory when it is released."""

    def __init__(self, memory: Tensor, content: Tensor, error: Exception | None = None) -> None:
        self._memory, self._content, self._error = memory, content, error
        self.release = threading.Event()

    def wait(self) -> None:
        raise AssertionError("nobody but the host can wait here")

    def finish(self) -> None:
        assert self.release.wait(60)
        if self._error is not None:
            raise self._error
        self._memory.copy_(self._content)


def test_a_write_begins_when_its_memory_is_filled_and_holds_nobody_up(store: DiskStore) -> None:
    memory, slots = torch.zeros(50, dtype=torch.uint8), [store.slot(50) for _ in range(9)]
    filling = Filling(memory, noise(50))
    writes = [store.write(slot, memory, after=[filling]) for slot in slots]
    assert comes_back(store, written(store, noise(70)), noise(70))
    assert not any(write.is_done() for write in writes)
    filling.release.set()
    assert all(comes_back(store, slot, noise(50)) for slot in slots)


def test_a_write_whose_memory_could_not_be_filled_fails(store: DiskStore) -> None:
    memory, slot = torch.zeros(50, dtype=torch.uint8), store.slot(50)
    filling = Filling(memory, noise(50), error=ValueError("the GPU is gone"))
    filling.release.set()
    with pytest.raises(ValueError, match="the GPU is gone"):
        store.write(slot, memory, after=[filling]).finish()
    with pytest.raises(ValueError, match="the GPU is gone"):
        comes_back(store, slot, memory)


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_writes_and_reads_gives_what_was_written_last(
    store: DiskStore, seed: int
) -> None:
    chance = random.Random(seed)
    sizes = [chance.choice([1, 700, ALIGNMENT, SMALL_PIECE * 3 + 11]) for _ in range(12)]
    slots = [store.slot(size) for size in sizes]
    last: dict[int, Tensor] = {}
    reads = []
    for number in range(400):
        index = chance.randrange(len(slots))
        if index not in last or chance.random() < 0.5:
            last[index] = noise(sizes[index], seed=number)
            store.write(slots[index], last[index])
        else:
            into = torch.empty(sizes[index], dtype=torch.uint8)
            reads.append((store.read(slots[index], into), into, last[index]))
        if chance.random() < 0.1:
            store.read(slots[index], torch.empty_like(last[index])).finish()
    for read, into, expected in chance.sample(reads, len(reads)):
        read.finish()
        assert torch.equal(into, expected)


# --- Faults ---------------------------------------------------------------------------------------


def behind(store: DiskStore, offset: int, change: Callable[[bytes], bytes]) -> None:
    """Change a byte of the file behind the store's back."""
    file = os.open(f"/proc/self/fd/{store._file._file}", os.O_RDWR)
    os.pwrite(file, change(os.pread(file, 1, offset)), offset)
    os.fsync(file)
    os.close(file)


@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize("offset", [0, SMALL_PIECE, 3 * SMALL_PIECE + 4])
def test_one_flipped_bit_is_found_and_the_slot_named(
    store: DiskStore, offset: int, bit: int
) -> None:
    content = noise(3 * SMALL_PIECE + 5)
    first, second = written(store, content), written(store, content)
    behind(store, store._slots[second].offset + offset, lambda byte: bytes([byte[0] ^ 1 << bit]))
    assert comes_back(store, first, content)
    with pytest.raises(DiskDamaged, match=r"slot 1 .* other bytes came back") as caught:
        comes_back(store, second, content)
    assert caught.value.slot == second
    store.write(second, content).finish()
    assert comes_back(store, second, content)


def test_a_write_that_the_disk_lost_is_found(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = written(store, noise(500))
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", lambda file, buffers, offset: sum(map(len, buffers)))
        store.write(slot, noise(500, seed=1)).finish()
    with pytest.raises(DiskDamaged):
        comes_back(store, slot, noise(500))


def test_a_file_cut_short_is_found(store: DiskStore) -> None:
    content = noise(3 * SMALL_PIECE)
    slot = written(store, content)
    os.ftruncate(store._file._file, SMALL_PIECE + 5)
    with pytest.raises(DiskDamaged, match="cut short"):
        comes_back(store, slot, content)


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int, *, after: int = 0) -> None:
    """Let a call of the system fail from the `after`th on."""
    real, calls = getattr(os, name), []

    def call(*args: Any) -> int:
        calls.append(1)
        if len(calls) > after:
            raise OSError(number, os.strerror(number))
        result: int = real(*args)
        return result

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("after", [0, 2])
def test_a_read_error_is_typed_and_names_the_slot(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    content = noise(4 * SMALL_PIECE)
    slot = written(store, content)
    with monkeypatch.context() as patched:
        failing(patched, "preadv", errno.EIO, after=after)
        with pytest.raises(DiskDamaged, match=r"slot 0 .* read: Input/output error") as caught:
            comes_back(store, slot, content)
        assert caught.value.slot == slot
    assert comes_back(store, slot, content)


@pytest.mark.parametrize(
    ("number", "error"),
    [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EIO, DiskDamaged)],
)
def test_a_slot_that_could_not_be_written_cannot_be_read_until_it_is_written_again(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    content = noise(4 * SMALL_PIECE)
    slot = written(store, noise(4 * SMALL_PIECE, seed=1))
    with monkeypatch.context() as patched:
        failing(patched, "pwritev", number, after=2)
        write = store.write(slot, content)
        read = store.read(slot, torch.empty_like(content))
        for copy in (write, read, write, store.read(slot, torch.empty_like(content))):
            with pytest.raises(error):
                copy.finish()
    with pytest.raises(error):
        comes_back(store, slot, content)
    store.write(slot, content).finish()
    assert comes_back(store, slot, content)


def test_an_error_that_nobody_has_heard_of_keeps_no_memory_alive(store: DiskStore) -> None:
    slot, into = written(store, noise(50)), noise(50)
    behind(store, 0, lambda byte: bytes([byte[0] ^ 1]))
    alive = weakref.ref(into.untyped_storage())
    read = store.read(slot, into)
    store.write(slot, noise(50)).finish()  # after the read
    del into
    gc.collect()
    assert read.is_done() and alive() is None
    with pytest.raises(DiskDamaged):
        read.finish()


# --- Ends -----------------------------------------------------------------------------------------


def test_closing_with_copies_under_way_leaves_no_thread_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_files()
    store = DiskStore(tmp_path)
    writes = HeldBack(monkeypatch, "pwritev")
    slots = [store.slot(3 * SMALL_PIECE) for _ in range(20)]
    copies = [store.write(slot, noise(3 * SMALL_PIECE)) for slot in slots for _ in range(2)]
    copies += [store.read(slot, noise(3 * SMALL_PIECE)) for slot in slots]
    writes.begun.wait()
    closing = threading.Thread(target=store.close)
    closing.start()
    while not store._threads._closing:
        time.sleep(0.001)
    writes.release()
    closing.join()
    store.close()
    assert all(copy.is_done() for copy in copies)
    assert writes.calls <= disk_threads.THREADS  # what had not begun was dropped
    with pytest.raises(RuntimeError, match=r"closed|shutdown"):
        copies[-1].finish()
    assert not threads_of_stores()
    assert open_files() == before


def test_an_exception_with_copies_under_way_lets_the_store_go(tmp_path: Path) -> None:
    def step() -> None:
        store = DiskStore(tmp_path)
        for _ in range(9):
            store.write(store.slot(5 * SMALL_PIECE), noise(5 * SMALL_PIECE))
        raise ValueError("in backward")

    with pytest.raises(ValueError, match="in backward"):
        step()
    gc.collect()
    assert eventually(lambda: not threads_of_stores())


def test_a_store_is_forgotten_without_waiting_for_what_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Garbage is collected anywhere, also while `threading` has locks that ending threads need.
    before, stores = open_files(), [DiskStore(tmp_path)]
    writes = HeldBack(monkeypatch, "pwritev")
    slots = [stores[0].slot(3 * SMALL_PIECE) for _ in range(20)]
    copies = [stores[0].write(slot, noise(3 * SMALL_PIECE)) for slot in slots]
    writes.begun.wait()
    assert waits_for_nobody(stores.clear)
    assert not any(copy.is_done() for copy in copies)
    assert open_files() > before, "the file is still written to"
    writes.release()
    assert eventually(lambda: all(copy.is_done() for copy in copies))
    assert writes.calls <= disk_threads.THREADS  # what had not begun was dropped
    assert eventually(lambda: not threads_of_stores())
    copies.clear()
    assert eventually(lambda: open_files() == before)


def test_a_forked_child_does_not_close_its_parents_store(store: DiskStore) -> None:
    slot = written(store, noise(50))
    child = os.fork()
    if child == 0:
        store.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert comes_back(store, slot, noise(50))
