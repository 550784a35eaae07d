"""Slots on the disk, with a ring of pinned buffers between it and the GPU.

Host memory is what the ring takes, however many slots there are. A put goes to a buffer and from
there to the disk; a get that was announced finds its bytes in a buffer already, and one of what was
put a moment ago finds them there still. One buffer is never given to what was only announced, so a
put always finds one.

The calling thread is held up only where it must be: by a put when all buffers still wait for the
disk, and by waiting for a get that the disk has not brought yet. What waits for the GPU waits in a
thread of the disk store. The link is called by the calling thread alone: a get whose bytes were not
there yet goes on to the GPU with the next call of the store, or when it is waited for.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from oomph.host.disk import DiskStore
from oomph.host.disk_threads import DiskCopy
from oomph.host.limits import check_host_memory
from oomph.host.link import Copy, DoneCopy, Link
from oomph.host.slots import view_like


class DiskSlots:
    """Slots in a file of a folder; see `oomph.host.slots.SlotStore`.

    Args:
        link: copies between the GPU and the ring.
        folder: where on the disk the slots are.
        largest: bytes of the largest slot, and so of each buffer.
        buffers: how many of them the ring has: two at least, and one more for each slot that is to
            be on its way ahead of time.
    """

    def __init__(self, link: Link, folder: Path, *, largest: int, buffers: int = 4) -> None:
        assert buffers >= 2
        check_host_memory(buffers * largest, "the ring of buffers before the disk")
        self._link = link
        self._disk = DiskStore(folder)
        self._largest = largest
        self._ring = deque(_Buffer(link.host_memory(largest)) for _ in range(buffers))
        """The least recently used first."""
        self._sizes: dict[int, int] = {}
        """Bytes that were put into each slot."""
        self._announced: deque[int] = deque()
        self._coming: list[_Get] = []
        """Gets that wait for the disk."""
        # Buffers are not given back under a card that copies from them, whoever forgets the store.
        weakref.finalize(self, _finish_gets, self._ring).atexit = False

    def slot(self, nbytes: int) -> int:
        """Room on the disk, reserved now, or `DiskFull`."""
        assert nbytes <= self._largest, "larger than the largest"
        return self._disk.slot(nbytes)

    def put(self, slot: int, source: Tensor) -> Copy:
        """Copy to a buffer, and from there to the disk."""
        self._forget(slot)
        buffer = self._free_buffer()
        for copy in buffer.on_disk:
            with contextlib.suppress(Exception):  # whoever gets that slot will hear of it
                copy.finish()
        out = self._link.to_host(source, view_like(buffer.memory, source), after=buffer.gets())
        write = self._disk.write(slot, buffer.memory[: source.nbytes], after=[out])
        buffer.begin(slot, filled_by=out, on_disk=write)
        self._sizes[slot] = source.nbytes
        self._go_on()
        return _Put(source, out, write)

    def get(self, slot: int, target: Tensor) -> Copy:
        """Copy from a buffer, after the disk filled it where none holds the slot's bytes."""
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
        """Wait for the card if it copies already; else it never will."""
        assert isinstance(get, _Get)
        get.give_up()

    def announce(self, slots: Sequence[int]) -> None:
        """Begin to read, in this order, as many as there are buffers for."""
        self._announced = deque(slots)
        for buffer in self._ring:
            buffer.wanted = False
        self._go_on()

    def close(self) -> None:
        """Wait for the link, drop what has not reached the disk, and give all back."""
        try:
            _finish_gets(self._ring)
        finally:
            self._disk.close()
            self._ring.clear()
            self._coming.clear()

    def _go_on(self) -> None:
        """Send on to the GPU what the disk has brought, and let it read what was announced."""
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
        """Let the disk fill a buffer once nobody uses it any more."""
        memory = buffer.memory[: self._sizes[slot]]
        read = self._disk.read(slot, memory, after=[*buffer.on_disk, *buffer.gets()])
        buffer.begin(slot, filled_by=read, on_disk=read)
        self._touch(buffer)
        return buffer

    def _free_buffer(self) -> _Buffer:
        """The one that was not used for longest, of those that nobody was promised."""
        buffer = next(buffer for buffer in self._ring if not buffer.wanted)
        for get in buffer.got:
            if not get.over:
                with contextlib.suppress(Exception):  # whoever waits for it will hear of it
                    get.begin()
        self._touch(buffer)
        return buffer

    def _touch(self, buffer: _Buffer) -> None:
        self._ring.remove(buffer)
        self._ring.append(buffer)

    def _buffer_of(self, slot: int) -> _Buffer | None:
        """The one that holds a slot's bytes, or will; a failed read counts as none."""
        buffer = next((buffer for buffer in self._ring if buffer.slot == slot), None)
        if buffer is not None and _has_failed(buffer.filled_by):
            buffer.slot, buffer.wanted = None, False
            return None
        return buffer

    def _forget(self, slot: int) -> None:
        """What a buffer holds of a slot is about to be old."""
        if (buffer := self._buffer_of(slot)) is not None:
            buffer.slot, buffer.wanted = None, False


class _Buffer:
    """Pinned memory, what it holds, and who is using it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.slot: int | None = None
        """The slot whose bytes it holds, or will when `filled_by` is done."""
        self.filled_by: Copy = DoneCopy()
        self.on_disk: list[DiskCopy] = []
        """What the disk reads from it or writes into it."""
        self.got: list[_Get] = []
        self.wanted = False
        """Whether its slot was announced and has not been got yet."""

    def begin(self, slot: int, *, filled_by: Copy, on_disk: DiskCopy) -> None:
        """Hold another slot; what used it before is waited for by what fills it."""
        self.slot, self.filled_by, self.on_disk, self.got = slot, filled_by, [on_disk], []

    def gets(self) -> list[Copy]:
        """Copies to the GPU that read it."""
        return [get.copy for get in self.got if get.copy is not None]

    @property
    def awaited(self) -> bool:
        """Whether somebody still has to copy from it."""
        return any(not get.over for get in self.got)


class _Put:
    """On its way to a buffer, and then to the disk."""

    def __init__(self, source: Tensor, out: Copy, write: DiskCopy) -> None:
        self._out, self._write = out, write
        # The disk's thread may be the first to see that `out` is done; the memory is freed here.
        self._held: tuple[Tensor, ...] = (source,)

    def wait(self) -> None:
        """The computing stream waits until the buffer has it."""
        self._out.wait()
        self._held = ()

    def finish(self) -> None:
        """The host waits until the disk has it."""
        self._out.finish()
        self._held = ()
        self._write.finish()


class _Get:
    """On its way to a buffer, and then to the GPU."""

    def __init__(self, link: Link, buffer: _Buffer, target: Tensor) -> None:
        self.copy: Copy | None = None
        """From the buffer to the GPU, once that was begun."""
        self._link = link
        self._filled_by = buffer.filled_by
        self._memory = view_like(buffer.memory, target)
        self._target: Tensor | None = target
        self._is_given_up = False

    def wait(self) -> None:
        """The host waits for the disk, and the computing stream for the rest."""
        self.begin().wait()

    def finish(self) -> None:
        """The host waits."""
        self.begin().finish()

    def begin(self) -> Copy:
        """Copy from the buffer to the GPU as soon as the disk has filled it."""
        if self.copy is None:
            after = []
            if isinstance(self._filled_by, DiskCopy):
                try:
                    self._filled_by.finish()
                except Exception:
                    self._target = None  # nothing will come into it
                    raise
            else:
                after.append(self._filled_by)
            target = self._target
            if target is None:
                assert self._is_given_up
                return DoneCopy()
            self.copy = self._link.to_gpu(self._memory, target, after=after)
            self._target = None  # the copy holds it until it is waited for
            if self._is_given_up:  # by another thread's garbage collector, in this very moment
                self.copy.finish()
        return self.copy

    def give_up(self) -> None:
        """Nobody wants it any more; what the disk brings stays in the buffer."""
        self._is_given_up = True
        self._target = None
        if self.copy is not None:
            self.copy.finish()

    def go_on(self) -> bool:
        """Begin if the disk is done; whether nothing is left to begin."""
        if isinstance(self._filled_by, DiskCopy) and not self._filled_by.is_done():
            return False
        if not self.over:
            self.begin()
        return True

    @property
    def over(self) -> bool:
        """Whether it reads its buffer no more once `copy` is done, or never will read it."""
        return self.copy is not None or self._is_given_up or _has_failed(self._filled_by)


def _finish_gets(ring: Iterable[_Buffer]) -> None:
    for buffer in ring:
        for copy in buffer.gets():
            copy.finish()


def _has_failed(copy: Copy) -> bool:
    return isinstance(copy, DiskCopy) and copy.error is not None
