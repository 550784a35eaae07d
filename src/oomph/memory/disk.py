"""Tensors on disk, in slots that are written and read while the GPU and the caller go on.

A slot is a fixed number of bytes in one unnamed file (`ScratchFile`). A few threads write and read
pieces of a slot, several at a time, without holding the GIL while they wait for the disk. Aligned
memory, such as pinned memory, is written and read in place; anything else goes through one aligned,
piece-sized buffer per thread.

Each piece has a checksum, kept in memory: a read returns the bytes that were written or raises an
error, even if the disk lost a write and returns the old contents. The checksum is zlib's CRC-32,
which costs a core about a quarter of a second per GB.

Within one slot, a read sees the last write requested before it, and a write waits for the reads
requested before it. `finish` raises errors in the thread that calls it. A slot whose write failed
cannot be read until it is written again.
"""

from __future__ import annotations

import os
import threading
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from oomph.errors import DiskDamaged
from oomph.memory.disk_threads import PIECE, DiskCopy, DiskThreads, staging_buffer
from oomph.memory.link import Copy
from oomph.memory.scratch_file import ALIGNMENT, NO_ROOM, Bytes, ScratchFile


class DiskStore:
    """Slots on a folder's disk; freed by `close`, or soon after the last reference is gone."""

    def __init__(self, folder: Path) -> None:
        self._file = ScratchFile(folder)
        self._threads = DiskThreads()
        self._slots: list[_Slot] = []
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._drop = weakref.finalize(self, _drop, self._threads, self._slots)

    @property
    def direct(self) -> bool:
        """Whether I/O bypasses the page cache."""
        return self._file.direct

    def slot(self, nbytes: int) -> int:
        """Reserve a new slot and return its number; `DiskFull` says how much room is missing."""
        with self._lock:
            number = len(self._slots)
            self._slots.append(_Slot(self._file, number, self._file.take(nbytes), nbytes))
        return number

    def write(self, slot: int, source: Tensor, after: Sequence[Copy] = ()) -> DiskCopy:
        """Write host memory to a slot once the copies in `after`, which fill it, are done.

        The memory must not change until the write is finished.
        """
        place, data = self._slots[slot], _bytes_of(source)
        assert data.nbytes <= place.nbytes, "more than the slot has room for"
        write = _Write(place, data)
        with self._lock:
            earlier = [*place.reads, *([place.last_write] if place.last_write else [])]
            place.last_write, place.reads = write, []
            self._start(write, earlier, after)
        return write

    def read(self, slot: int, into: Tensor, after: Sequence[Copy] = ()) -> DiskCopy:
        """Read the slot's last write into host memory of that size, once `after` are done with it.

        It does not matter whether the copies in `after` succeeded.
        """
        place = self._slots[slot]
        with self._lock:
            assert place.last_write is not None, "nothing was written to the slot"
            read = _Read(place, _bytes_of(into), place.last_write)
            place.reads = [*(earlier for earlier in place.reads if not earlier.is_done()), read]
            self._start(read, [place.last_write], after)
        return read

    def close(self) -> None:
        """Drop copies that have not begun, wait for those that have, and free the disk space."""
        if os.getpid() != self._owner:
            return  # a forked child inherits the file, but none of the threads
        self._drop()
        self._threads.close()
        self._file.close()

    def _start(self, copy: DiskCopy, earlier: list[DiskCopy], after: Sequence[Copy]) -> None:
        assert self._drop.alive, "the store is closed"
        self._threads.start(copy, earlier, after)


def _drop(threads: DiskThreads, slots: list[_Slot]) -> None:
    """Start nothing more; copies under way hold only what they need themselves."""
    threads.drop()
    for slot in slots:
        slot.last_write, slot.reads = None, []


class _Slot:
    """A range of the file, and the copies that use it."""

    def __init__(self, file: ScratchFile, number: int, offset: int, nbytes: int) -> None:
        self.file, self.number, self.offset, self.nbytes = file, number, offset, nbytes
        self.last_write: _Write | None = None
        self.reads: list[DiskCopy] = []
        """Reads since the last write."""


class _Write(DiskCopy):
    """A copy from memory to a slot."""

    def __init__(self, slot: _Slot, data: Bytes) -> None:
        super().__init__(data)
        self.nbytes = data.nbytes
        self.checksums = [0] * self.pieces
        self._slot = slot

    def move(self, piece: Bytes, index: int) -> None:
        """Write one piece."""
        self.checksums[index] = zlib.crc32(piece.data)
        calls, outside, inside = _aligned(piece, self._slot.file)
        np.copyto(inside, outside)
        self._slot.file.write(self._slot.offset + index * PIECE, calls)

    def in_words(self, error: Exception) -> Exception:
        """The error with advice on what to do."""
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return self._slot.file.full(self.nbytes, error)
        return _damaged(self._slot, "written", error) if isinstance(error, OSError) else error


class _Read(DiskCopy):
    """A copy from a slot to memory."""

    def __init__(self, slot: _Slot, data: Bytes, written: _Write) -> None:
        assert data.nbytes == written.nbytes, "another size than was written"
        super().__init__(data)
        self._slot = slot
        self._written = written

    def move(self, piece: Bytes, index: int) -> None:
        """Read one piece and verify its checksum."""
        if self._written.error is not None:
            raise self._written.error
        calls, outside, inside = _aligned(piece, self._slot.file)
        self._slot.file.read(self._slot.offset + index * PIECE, calls)
        np.copyto(outside, inside)
        if zlib.crc32(piece.data) != self._written.checksums[index]:
            raise _damaged(self._slot, "trusted", "other bytes came back than were written")

    def in_words(self, error: Exception) -> Exception:
        """The error with advice on what to do."""
        return _damaged(self._slot, "read", error) if isinstance(error, OSError) else error


def _damaged(slot: _Slot, verb: str, error: OSError | str) -> DiskDamaged:
    reason = error if isinstance(error, str) else error.strerror or str(error)
    return DiskDamaged(
        f"slot {slot.number} ({slot.nbytes:,} bytes on the disk of {slot.file.folder}) cannot be"
        f" {verb}: {reason}; go back to the last checkpoint, look at the disk's health, or name a"
        " folder on another disk",
        slot.number,
    )


def _aligned(piece: Bytes, file: ScratchFile) -> tuple[list[Bytes], Bytes, Bytes]:
    """Buffers for direct I/O, the part of the piece outside them, and the buffer for that part.

    If the piece is aligned, only its last, incomplete block needs the staging buffer.
    """
    straight = piece.nbytes
    if file.direct:
        straight = 0 if piece.ctypes.data % ALIGNMENT else straight - straight % ALIGNMENT
    outside = piece[straight:]
    staging = staging_buffer()[: -(-outside.nbytes // ALIGNMENT) * ALIGNMENT]
    calls = [part for part in (piece[:straight], staging) if part.nbytes]
    return calls, outside, staging[: outside.nbytes]


def _bytes_of(tensor: Tensor) -> Bytes:
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
