"""Slots in host memory: what others are held against."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from oomph.memory.link import Copy, Link
from oomph.memory.numbered_store import view_like


class MemorySlots:
    """Slots in the link's host memory; see `oomph.memory.numbered_store.SlotStore`."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._memory: list[Tensor] = []
        self._last: list[tuple[Copy | None, Copy | None]] = []
        """The last put and the last get of each slot: of one direction, the last to end."""

    def slot(self, nbytes: int) -> int:
        """Host memory of this size."""
        self._memory.append(self._link.host_memory(nbytes))
        self._last.append((None, None))
        return len(self._memory) - 1

    def put(self, slot: int, source: Tensor) -> Copy:
        """Copy to the host."""
        _, got = self._last[slot]
        memory = view_like(self._memory[slot], source)
        copy = self._link.to_host(source, memory, after=[got] if got else [])
        self._last[slot] = copy, got
        return copy

    def get(self, slot: int, target: Tensor) -> Copy:
        """Copy to the GPU."""
        put, _ = self._last[slot]
        assert put is not None, "nothing was put into the slot"
        copy = self._link.to_gpu(view_like(self._memory[slot], target), target, after=[put])
        self._last[slot] = put, copy
        return copy

    def give_up(self, get: Copy) -> None:
        """Wait for it."""
        get.finish()

    def announce(self, slots: Sequence[int]) -> None:
        """Nothing to prepare."""

    def close(self) -> None:
        """Wait and let the memory go."""
        for copy in (copy for last in self._last for copy in last if copy is not None):
            copy.finish()
        self._memory.clear()
        self._last.clear()
