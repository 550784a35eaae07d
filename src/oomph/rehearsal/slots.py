"""Slots on the disk in a rehearsal: nothing is written, but the clock knows the disk.

The disk does one thing at a time, whosever slots it is for, reads what was announced ahead, as far
as there are buffers, and has a step wait where all of them are in use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from oomph.gpus import GPU
from oomph.gpus.profile import load_profile
from oomph.host.link import Copy
from oomph.rehearsal.link import RehearsedCopy, RehearsedLink
from oomph.rehearsal.recorder import Recorder

#: Bytes per second of a disk that was not measured: a guess, for an NVMe disk that is not the best.
DISK_READ, DISK_WRITE = 3e9, 1.5e9


class RehearsedSlots:
    """Slots beside the card that is rehearsed; see `oomph.host.slots.SlotStore`."""

    def __init__(
        self, recorder: Recorder, link: RehearsedLink, gpu: GPU, *, largest: int, buffers: int
    ) -> None:
        self._recorder = recorder
        self._link = link
        profile = load_profile(gpu.name)
        self._read = (profile.disk_read if profile else None) or DISK_READ
        self._write = (profile.disk_write if profile else None) or DISK_WRITE
        self._ring = link.host_memory(largest * buffers)
        #: When each buffer is free again, the first one first.
        self._buffers = deque([0.0] * buffers)
        self._slots = 0
        #: By slot: when what was put is on the disk.
        self._written: dict[int, float] = {}
        self._announced: dict[int, float] = {}

    def slot(self, nbytes: int) -> int:
        """Room on the disk, counted."""
        self._recorder.timeline.disk_bytes += nbytes
        self._slots += 1
        return self._slots - 1

    def put(self, slot: int, source: Tensor) -> Copy:
        """To a buffer when one is free, and from there to the disk."""
        free = self._buffers.popleft()
        self._wait_until(free)
        copy = self._link.to_host(source, source)
        assert isinstance(copy, RehearsedCopy)
        self._written[slot] = self._disk_until(copy.end, source.nbytes / self._write)
        self._buffers.append(self._written[slot])
        return copy

    def get(self, slot: int, target: Tensor) -> Copy:
        """From the disk to a buffer, ahead of time where it was announced, and on to the GPU."""
        free = self._buffers.popleft()
        earliest = self._announced.pop(slot, self._recorder.seconds)
        begin = max(free, earliest, self._written.get(slot, 0.0))
        end = self._disk_until(begin, target.nbytes / self._read)
        copy = self._link.to_gpu(target, target, after=[RehearsedCopy(self._recorder, end)])
        assert isinstance(copy, RehearsedCopy)
        self._buffers.append(copy.end)
        return copy

    def give_up(self, get: Copy) -> None:
        """It takes its time all the same."""
        get.finish()

    def announce(self, slots: Sequence[int]) -> None:
        """They are read from now on."""
        self._announced = dict.fromkeys(slots, self._recorder.seconds)

    def close(self) -> None:
        """Nothing is under way."""

    def _disk_until(self, begin: float, seconds: float) -> float:
        """When the disk has done what it can begin then, after all else that it was given."""
        self._link.disk_free = max(self._link.disk_free, begin) + seconds
        return self._link.disk_free

    def _wait_until(self, moment: float) -> None:
        """The host waits, and with it the kernels that it would launch."""
        RehearsedCopy(self._recorder, moment).wait()
