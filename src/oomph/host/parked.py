"""Memory of the GPU that is parked on the host: it leaves, waits in a slot and comes back.

Slots are made at first use, as large as they have to be, and used again in every step. A slot
belongs to what is parked in it until nobody wants that any more.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Hashable

import torch
from torch import Tensor

from oomph.host.link import Copy, Link


class Slots:
    """Host memory by position: what is parked at the same position each time reuses it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._slots: defaultdict[Hashable, list[_Slot]] = defaultdict(list)

    def park(self, tensor: Tensor, position: Hashable) -> Parked:
        """Start to copy the whole memory that `tensor` is a view of."""
        slots = self._slots[position]
        slot = next((slot for slot in slots if slot.is_free), None)
        if slot is None:
            slot = _Slot()
            slots.append(slot)
        return Parked(tensor, self._link, slot)

    def clear(self) -> None:
        """Forget all slots; what is parked keeps its own until it is fetched for the last time."""
        self._slots.clear()


class _Slot:
    """Host memory that one thing at a time is parked in."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self.user: weakref.ref[Parked] | None = None
        #: The last copy that reads the memory; the next one that writes to it comes after it.
        self.reads: tuple[Copy, ...] = ()

    @property
    def is_free(self) -> bool:
        return self.user is None or self.user() is None

    def room(self, like: Tensor, link: Link) -> Tensor:
        """So much of the memory as `like` needs; new memory where it is too small."""
        nbytes = like.numel() * like.element_size()
        if self.memory is None or self.memory.numel() < nbytes:
            self.memory = link.host_memory(nbytes)
        return self.memory[:nbytes].view(like.dtype)


class Parked:
    """The memory of one tensor and its views, on its way to the host and back.

    It is here until `leave`, and again from `fetch` until everybody who wants it has had it.
    """

    def __init__(self, tensor: Tensor, link: Link, slot: _Slot) -> None:
        self._in: Copy | None = None
        self._out: Copy | None = None
        flat = whole_memory(tensor)
        self.nbytes = flat.numel() * flat.element_size()
        #: How many have yet to ask for it.
        self.wanted = 0
        self._link = link
        self._slot = slot
        self._version = flat._version
        self._changed = False
        self._numel, self._dtype, self._device = flat.numel(), flat.dtype, flat.device
        self._there = slot.room(flat, link)
        self._here: Tensor | None = flat
        self._out = link.to_host(flat, self._there, after=slot.reads)
        slot.user = weakref.ref(self)

    def holds(self, tensor: Tensor) -> bool:
        """Whether what is parked is what `tensor`, a view of the same memory, holds now."""
        return (
            not self._changed
            and tensor._version == self._version
            and self.nbytes % tensor.element_size() == 0
        )

    def leave(self) -> None:
        """Wait for the copy to the host and give the GPU's memory back."""
        if self._out is None or self._here is None:
            return
        # Somebody wrote over it while it was copied. Autograd refuses such a tensor, and so do we.
        self._changed = self._here._version != self._version
        self._out.wait()
        self._out = self._here = None

    def fetch(self) -> None:
        """Start to copy it back, unless it is here or on its way, or nobody waits for it."""
        if self.wanted:
            self._start_fetch()

    def want(self) -> None:
        """Somebody will ask for it."""
        self.wanted += 1

    def unwant(self) -> None:
        """Somebody who wanted it will not ask for it after all."""
        self.wanted -= 1
        if not self.wanted and self._out is None:
            self._drop()

    def take(self, *, first: bool) -> Tensor:
        """It as a flat tensor, for somebody who wanted it; after the last one it is gone.

        Who asks again, not for the `first` time, has it fetched again.
        """
        self.wanted -= first
        self._start_fetch()
        if self._in is not None:
            self._in.wait()
            self._in = None
        flat = self._here
        assert flat is not None
        if self._changed or (self._out is not None and flat._version != self._version):
            raise RuntimeError(
                "a tensor that is needed to compute gradients was changed in place after it was"
                " saved for them"
            )
        if not self.wanted:
            self.leave()
            self._here = None
        return flat

    def _drop(self) -> None:
        if self._in is not None:
            # Nobody waited for it, as after a backward that failed, and its memory must not be used
            # for anything else before it is done.
            self._in.finish()
        self._in = self._here = None

    def _start_fetch(self) -> None:
        if self._here is not None:
            return
        self._here = torch.empty(self._numel, dtype=self._dtype, device=self._device)
        self._in = self._link.to_gpu(self._there, self._here)
        self._slot.reads = (self._in,)


def whole_memory(tensor: Tensor) -> Tensor:
    """All of the memory that `tensor` is a view of, as a flat tensor of its dtype."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((count,), (1,), 0)
