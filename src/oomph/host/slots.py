"""Slots: the host's side of what leaves the GPU and comes back, wherever the host keeps it.

A technique asks for a slot for each thing that leaves, puts a tensor of the GPU into it and gets it
back later; whether the bytes wait in pinned memory (`MemorySlots`) or on the disk (`DiskSlots`) is
not its concern. The rule of links holds here too: keep each `Copy` until somebody waited for it.

The order of what is asked for is the order of what happens: a `get` brings what the last `put` of
the slot took along, and a `put` overwrites nothing that an earlier `get` still needs.

Optimizer state, streamed through two buffers on the GPU, one bucket ahead:

    store.announce(slots)
    coming = store.get(slots[0], gpu[0])
    for this, following in zip(slots, [*slots[1:], None]):
        if following is not None:
            leaving.wait()  # the last bucket, whose buffer the following one will have
            next_coming = store.get(following, the other buffer)
        coming.wait()
        step(this buffer)
        leaving, coming = store.put(this, this buffer), next_coming

Activations: `put` in forward, `announce` in reverse when forward ends, `get` in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from oomph.host.link import Copy, Link


class SlotStore(Protocol):
    """Room for tensors beside the GPU, by number."""

    def slot(self, nbytes: int) -> int:
        """Room for so many bytes, reserved now; its number."""

    def put(self, slot: int, source: Tensor) -> Copy:
        """Take along what the computing stream has put into `source` by now.

        After `wait` the source may be overwritten by the computing stream; after `finish` it is
        where it is kept, and an error would have been raised.
        """

    def get(self, slot: int, target: Tensor) -> Copy:
        """Bring what was put last, a tensor of that size, into memory that is no longer in use."""

    def announce(self, slots: Sequence[int]) -> None:
        """Say which slots will be got next, in this order; forget what was announced before."""

    def close(self) -> None:
        """Wait for every copy and give everything back; the link stays open."""


class MemorySlots:
    """Slots in the link's host memory; see `SlotStore`."""

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

    def announce(self, slots: Sequence[int]) -> None:
        """Nothing to prepare."""

    def close(self) -> None:
        """Wait and let the memory go."""
        for copy in (copy for last in self._last for copy in last if copy is not None):
            copy.finish()
        self._memory.clear()
        self._last.clear()


def view_like(memory: Tensor, tensor: Tensor) -> Tensor:
    """The beginning of some bytes as a tensor of another's shape and type."""
    assert tensor.nbytes <= memory.nbytes, "more than the slot has room for"
    return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
