"""The numbered store on the disk in a rehearsal: writes nothing, but the clock models the disk.

The disk does one thing at a time, for all stores together. It reads announced tensors ahead as far
as there are free buffers; a step waits while all buffers are in use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from oomph.hardware import GPU
from oomph.hardware.profile import load_profile
from oomph.memory.link import Copy
from oomph.rehearsal.link import RehearsedCopy, RehearsedLink
from oomph.rehearsal.recorder import Recorder

#: Bytes per second of an unmeasured disk: a guess for an NVMe disk that is not the best.
DISK_READ, DISK_WRITE = 3e9, 1.5e9


class RehearsedStore:
    """A numbered store beside the rehearsed card; see `oomph.memory.numbered_store`."""

    def __init__(
        self, recorder: Recorder, link: RehearsedLink, gpu: GPU, *, largest: int, buffers: int
    ) -> None:
        self._recorder = recorder
        self._link = link
        profile = load_profile(gpu.name)
        self._read = (profile.disk_read if profile else None) or DISK_READ
        self._write = (profile.disk_write if profile else None) or DISK_WRITE
        self._ring = link.host_memory(largest * buffers)
        #: When each buffer is free again, in the order the buffers are used.
        self._buffers = deque([0.0] * buffers)
        self._slots = 0
        #: By slot: when its contents are on the disk.
        self._written: dict[int, float] = {}
        self._announced: dict[int, float] = {}

    def slot(self, nbytes: int) -> int:
        """Reserve space on the disk, and count it."""
        self._recorder.timeline.disk_bytes += nbytes
        self._slots += 1
        return self._slots - 1

    def put(self, slot: int, source: Tensor) -> Copy:
        """Copy to a buffer once one is free, and from there to the disk."""
        free = self._buffers.popleft()
        self._wait_until(free)
        copy = self._link.to_host(source, source)
        assert isinstance(copy, RehearsedCopy)
        self._written[slot] = self._disk_until(copy.end, source.nbytes / self._write)
        self._buffers.append(self._written[slot])
        return copy

    def get(self, slot: int, target: Tensor) -> Copy:
        """Read from the disk into a buffer, ahead of time if announced, and copy on to the GPU."""
        free = self._buffers.popleft()
        earliest = self._announced.pop(slot, self._recorder.seconds)
        begin = max(free, earliest, self._written.get(slot, 0.0))
        end = self._disk_until(begin, target.nbytes / self._read)
        copy = self._link.to_gpu(target, target, after=[RehearsedCopy(self._recorder, end)])
        assert isinstance(copy, RehearsedCopy)
        self._buffers.append(copy.end)
        return copy

    def give_up(self, get: Copy) -> None:
        """Wait for the read: giving it up does not make it shorter."""
        get.finish()

    def announce(self, slots: Sequence[int]) -> None:
        """The disk may read these slots from now on."""
        self._announced = dict.fromkeys(slots, self._recorder.seconds)

    def close(self) -> None:
        """There is nothing to close: no read or write is really under way."""

    def _disk_until(self, begin: float, seconds: float) -> float:
        """When the disk finishes work that may start at `begin`, after all earlier work."""
        self._link.disk_free = max(self._link.disk_free, begin) + seconds
        return self._link.disk_free

    def _wait_until(self, moment: float) -> None:
        """Make the host wait, and with it the kernels that it would launch."""
        RehearsedCopy(self._recorder, moment).wait()
