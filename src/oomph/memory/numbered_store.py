"""Numbered slots that hold offloaded tensors, wherever the host keeps them.

A technique asks for a slot for each tensor it offloads, puts a GPU tensor into it and gets it back
later. It does not care where the bytes are: on disk (`NumberedDiskStore`), or nowhere, in a
rehearsal. The rule of links holds here too: keep each `Copy` until it has been waited for.

Requests take effect in the order they are made: a `get` returns what the last `put` to the slot
stored, and a `put` overwrites nothing that an earlier `get` still needs.

Optimizer state, streamed through two GPU buffers, one bucket ahead:

    store.announce(slots)
    coming = store.get(slots[0], gpu[0])
    for this, following in zip(slots, [*slots[1:], None]):
        if following is not None:
            leaving.wait()  # the last bucket, whose buffer the following one will have
            next_coming = store.get(following, the other buffer)
        coming.wait()
        step(this buffer)
        leaving, coming = store.put(this, this buffer), next_coming

Activations: `put` in forward, `announce` in reverse order after forward, `get` in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from oomph.memory.link import Copy


class NumberedStore(Protocol):
    """Numbered slots for tensors outside the GPU."""

    def slot(self, nbytes: int) -> int:
        """Reserve a slot of this size and return its number."""

    def put(self, slot: int, source: Tensor) -> Copy:
        """Store what the computing stream has written to `source` by now.

        After `wait` the computing stream may overwrite the source; after `finish` the bytes are
        stored, and any error has been raised.
        """

    def get(self, slot: int, target: Tensor) -> Copy:
        """Copy what was put last, of the same size, into memory that is no longer in use."""

    def give_up(self, get: Copy) -> None:
        """Cancel a `get`; its target is free when this returns.

        It waits for the GPU at most, never for a thread: a garbage collector may call it.
        """

    def announce(self, slots: Sequence[int]) -> None:
        """Say which slots are got next, in this order; replaces earlier announcements."""

    def close(self) -> None:
        """Wait for every copy and release everything; the link stays open."""


#: Opens a store, given the size of the largest slot and the number of host buffers.
OpenStore = Callable[[int, int], NumberedStore]


def view_like(memory: Tensor, tensor: Tensor) -> Tensor:
    """The beginning of some bytes, viewed with another tensor's shape and dtype."""
    assert tensor.nbytes <= memory.nbytes, "more than the slot has room for"
    return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
