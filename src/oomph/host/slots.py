"""Slots: the host's side of what leaves the GPU and comes back, wherever the host keeps it.

A technique asks for a slot for each thing that leaves, puts a tensor of the GPU into it and gets it
back later; where the bytes wait is not its concern: on the disk (`DiskSlots`), or nowhere, in a
rehearsal. The rule of links holds here too: keep each `Copy` until somebody waited for it.

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

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from oomph.host.link import Copy


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

    def give_up(self, get: Copy) -> None:
        """Nobody wants what this `get` brings; its target is free when this returns.

        It waits for the card at most, and for no thread: a garbage collector may call it.
        """

    def announce(self, slots: Sequence[int]) -> None:
        """Say which slots will be got next, in this order; forget what was announced before."""

    def close(self) -> None:
        """Wait for every copy and give everything back; the link stays open."""


#: Opens slots: bytes of the largest, and how many buffers of host memory there are before them.
OpenSlots = Callable[[int, int], SlotStore]


def view_like(memory: Tensor, tensor: Tensor) -> Tensor:
    """The beginning of some bytes as a tensor of another's shape and type."""
    assert tensor.nbytes <= memory.nbytes, "more than the slot has room for"
    return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
