"""Slots on disk, with a ring of pinned buffers between the disk and the GPU.

The ring is all the host memory used, however many slots there are. A put copies to a buffer, which
is then written to disk. A get that was announced, or that follows soon after its put, finds its
bytes already in a buffer. Announced gets never take the last buffer, so a put always finds one.

The calling thread blocks only where it must: in a put when every buffer is still being written, and
in waiting for a get that has not been read yet. A thread of the disk store does the waiting for the
GPU. Only the calling thread uses the link, so a get whose bytes arrive late goes on to the GPU at
the store's next call, or when it is waited for.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from oomph.memory.disk import DiskStore
from oomph.memory.disk_threads import DiskCopy
from oomph.memory.limits import check_host_memory
from oomph.memory.link import Copy, DoneCopy, Link
from oomph.memory.numbered_store import view_like


class NumberedDiskStore:
    """Slots in a file of a folder; see `oomph.memory.numbered_store.NumberedStore`.

    Args:
        link: copies between the GPU and the ring.
        folder: where on disk the slots are.
        largest: bytes of the largest slot, and so of each buffer.
        buffers: how many buffers the ring has: at least two, and one more for each slot to be
            prefetched.
    """

    def __init__(self, link: Link, folder: Path, *, largest: int, buffers: int = 4) -> None:
        assert buffers >= 2
        check_host_memory(buffers * largest, "the ring of buffers before the disk")
        self._link = link
        self._disk = DiskStore(folder)
        self._largest = largest
        self._ring = deque(_Buffer(link.host_memory(largest)) for _ in range(buffers))
        """Least recently used first."""
        self._sizes: dict[int, int] = {}
        """Bytes that were put into each slot."""
        self._announced: deque[int] = deque()
        self._coming: list[_Get] = []
        """Gets that still wait for the disk."""
        # Buffers outlive a dropped store for as long as the GPU copies from them.
        weakref.finalize(self, _finish_gets, self._ring).atexit = False

    def slot(self, nbytes: int) -> int:
        """Reserve disk space for a slot, or raise `DiskFull`."""
        assert nbytes <= self._largest, "larger than the largest"
        return self._disk.slot(nbytes)

    def put(self, slot: int, source: Tensor) -> Copy:
        """Copy to a buffer, and from there to the disk."""
        self._forget(slot)
        buffer = self._free_buffer()
        for copy in buffer.on_disk:
            with contextlib.suppress(Exception):  # the next get of that slot raises it
                copy.finish()
        out = self._link.to_host(source, view_like(buffer.memory, source), after=buffer.gets())
        write = self._disk.write(slot, buffer.memory[: source.nbytes], after=[out])
        buffer.begin(slot, filled_by=out, on_disk=write)
        self._sizes[slot] = source.nbytes
        self._go_on()
        return _Put(source, out, write)

    def get(self, slot: int, target: Tensor) -> Copy:
        """Copy from a buffer, reading the slot from disk first if no buffer holds its bytes."""
        assert target.nbytes == self._sizes[slot], "another size than was put"
        with contextlib.suppress(ValueError):
            self._announced.remove(slot)
        buffer = self._buffer_of(slot) or self._fetch(slot, self._free_buffer())
        buffer.wanted = False
        self._touch(buffer)
        get = _Get(self._link, buffer, target)
        buffer.got.append(get)
        self._coming.append(get)
        self._go_on()
        return get

    def give_up(self, get: Copy) -> None:
        """Wait for the copy to the GPU if it has begun; otherwise it never will."""
        assert isinstance(get, _Get)
        get.give_up()

    def announce(self, slots: Sequence[int]) -> None:
        """Start reading the slots in this order, as many as there are buffers for."""
        self._announced = deque(slots)
        for buffer in self._ring:
            buffer.wanted = False
        self._go_on()

    def close(self) -> None:
        """Wait for the link, drop writes that have not begun, and free everything."""
        try:
            _finish_gets(self._ring)
        finally:
            self._disk.close()
            self._ring.clear()
            self._coming.clear()

    def _go_on(self) -> None:
        """Send finished reads on to the GPU, and start reading announced slots."""
        self._coming = [get for get in self._coming if not get.go_on()]
        while self._announced:
            unpromised = [buffer for buffer in self._ring if not buffer.wanted]
            if len(unpromised) == 1:
                return
            slot = self._announced[0]
            buffer = self._buffer_of(slot)
            if buffer is None:
                if unpromised[0].awaited:
                    return
                buffer = self._fetch(slot, unpromised[0])
            buffer.wanted = True
            self._announced.popleft()

    def _fetch(self, slot: int, buffer: _Buffer) -> _Buffer:
        """Have the disk fill a buffer once its current users are done."""
        memory = buffer.memory[: self._sizes[slot]]
        read = self._disk.read(slot, memory, after=[*buffer.on_disk, *buffer.gets()])
        buffer.begin(slot, filled_by=read, on_disk=read)
        self._touch(buffer)
        return buffer

    def _free_buffer(self) -> _Buffer:
        """The least recently used buffer that is not reserved for an announced slot."""
        buffer = next(buffer for buffer in self._ring if not buffer.wanted)
        for get in buffer.got:
            if not get.over:
                with contextlib.suppress(Exception):  # waiting for the get raises it
                    get.begin()
        self._touch(buffer)
        return buffer

    def _touch(self, buffer: _Buffer) -> None:
        self._ring.remove(buffer)
        self._ring.append(buffer)

    def _buffer_of(self, slot: int) -> _Buffer | None:
        """The buffer that has a slot's bytes or will; None after a failed read."""
        buffer = next((buffer for buffer in self._ring if buffer.slot == slot), None)
        if buffer is not None and _has_failed(buffer.filled_by):
            buffer.slot, buffer.wanted = None, False
            return None
        return buffer

    def _forget(self, slot: int) -> None:
        """Drop the buffered bytes of a slot that is about to be overwritten."""
        if (buffer := self._buffer_of(slot)) is not None:
            buffer.slot, buffer.wanted = None, False


class _Buffer:
    """Pinned memory, the slot it holds, and the copies that use it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.slot: int | None = None
        """The slot whose bytes it holds, or will when `filled_by` is done."""
        self.filled_by: Copy = DoneCopy()
        self.on_disk: list[DiskCopy] = []
        """Disk writes from it or reads into it."""
        self.got: list[_Get] = []
        self.wanted = False
        """Whether its slot was announced and not got yet."""

    def begin(self, slot: int, *, filled_by: Copy, on_disk: DiskCopy) -> None:
        """Assign it to another slot; the copy that fills it waits for earlier users."""
        self.slot, self.filled_by, self.on_disk, self.got = slot, filled_by, [on_disk], []

    def gets(self) -> list[Copy]:
        """Copies from it to the GPU."""
        return [get.copy for get in self.got if get.copy is not None]

    @property
    def awaited(self) -> bool:
        """Whether some get has yet to copy from it."""
        return any(not get.over for get in self.got)


class _Put:
    """A copy to a buffer, and from there to disk."""

    def __init__(self, source: Tensor, out: Copy, write: DiskCopy) -> None:
        self._out, self._write = out, write
        # A disk thread may be the first to see that `out` is done; the memory is freed here.
        self._held: tuple[Tensor, ...] = (source,)

    def wait(self) -> None:
        """Make the computing stream wait until the buffer is filled."""
        self._out.wait()
        self._held = ()

    def finish(self) -> None:
        """Block the host until the bytes are on disk."""
        self._out.finish()
        self._held = ()
        self._write.finish()


class _Get:
    """A copy from disk to a buffer, and from there to the GPU."""

    def __init__(self, link: Link, buffer: _Buffer, target: Tensor) -> None:
        self.copy: Copy | None = None
        """The copy from the buffer to the GPU, once begun."""
        self._link = link
        self._filled_by = buffer.filled_by
        self._memory = view_like(buffer.memory, target)
        self._target: Tensor | None = target
        self._is_given_up = False

    def wait(self) -> None:
        """Block the host for the disk read; the computing stream waits for the rest."""
        self.begin().wait()

    def finish(self) -> None:
        """Block the host until the copy is done."""
        self.begin().finish()

    def begin(self) -> Copy:
        """Start the copy from the buffer to the GPU once the disk has filled the buffer."""
        if self.copy is None:
            after = []
            if isinstance(self._filled_by, DiskCopy):
                try:
                    self._filled_by.finish()
                except Exception:
                    self._target = None  # nothing will be copied into it
                    raise
            else:
                after.append(self._filled_by)
            target = self._target
            if target is None:
                assert self._is_given_up
                return DoneCopy()
            self.copy = self._link.to_gpu(self._memory, target, after=after)
            self._target = None  # the copy holds it until it is waited for
            if self._is_given_up:  # by a garbage collector on another thread, at this very moment
                self.copy.finish()
        return self.copy

    def give_up(self) -> None:
        """Cancel the get; the bytes read from disk stay in the buffer."""
        self._is_given_up = True
        self._target = None
        if self.copy is not None:
            self.copy.finish()

    def go_on(self) -> bool:
        """Begin if the disk read is done; returns whether nothing is left to begin."""
        if isinstance(self._filled_by, DiskCopy) and not self._filled_by.is_done():
            return False
        if not self.over:
            self.begin()
        return True

    @property
    def over(self) -> bool:
        """Whether it needs its buffer only until `copy` is done, or no longer at all."""
        return self.copy is not None or self._is_given_up or _has_failed(self._filled_by)


def _finish_gets(ring: Iterable[_Buffer]) -> None:
    for buffer in ring:
        for copy in buffer.gets():
            copy.finish()


def _has_failed(copy: Copy) -> bool:
    return isinstance(copy, DiskCopy) and copy.error is not None
