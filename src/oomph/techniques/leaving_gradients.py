"""Gradients that leave the GPU as soon as a backward has made them, and wait outside it.

They wait in host memory, or on the disk (`DiskGradients`) where some have room there. Those that
the host's cores step are in its memory.

Where several micro-batches add to a gradient, what there is of it comes back for each, is added to
on the GPU as PyTorch would, and leaves again. It comes back before it is needed: gradients are made
in the same order in each backward.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from oomph.errors import OomphError
from oomph.host.link import Copies, Copy, Link
from oomph.techniques.disk_gradients import DiskGradients
from oomph.techniques.host_tensors import gpu_like, host_tensor
from oomph.techniques.step_buckets import Piece, Trained, whole

#: How many gradients come back before they are added to.
_AHEAD = 2


class LeavingGradients:
    """What of the gradients left; `in_flight` bytes may be on their way."""

    def __init__(self, link: Link, in_flight: int) -> None:
        self._link = link
        self._most = in_flight
        #: Whose gradients wait there, where any do.
        self.disk: DiskGradients | None = None
        #: By parameter whose gradients wait in host memory: where.
        self._slots: dict[Trained, Tensor] = {}
        #: By parameter of which a gradient is here: its type, and the copy that brought it.
        self._filled: dict[Trained, tuple[torch.dtype, Copy]] = {}
        self._leaving: deque[tuple[Copy, int]] = deque()
        self._coming: dict[Trained, tuple[Tensor, Copy]] = {}
        #: The order in which gradients were made last time, and this time so far.
        self._order: list[Trained] = []
        self._places: dict[Trained, int] = {}
        self._made: list[Trained] = []

    @property
    def is_empty(self) -> bool:
        """Whether no gradient is here."""
        return not self._filled and not self._coming

    def __contains__(self, trained: Trained) -> bool:
        return trained in self._filled or trained in self._coming

    def begin_backward(self) -> None:
        """Another backward is about to make gradients."""
        if self._made:
            self._order, self._made = self._made, []
            self._places = {trained: at for at, trained in enumerate(self._order)}

    def send(self, trained: Trained, gradient: Tensor, dtype: torch.dtype) -> None:
        """Let a gradient leave, as `dtype`; it must not be written to any more."""
        leaving = gradient.to(dtype)
        if self.disk is not None and trained in self.disk:
            copy = self.disk.put(trained, leaving)
        else:
            copy = self._link.to_host(leaving, self._slot(trained, dtype))
        self._filled[trained] = dtype, copy
        self._leaving.append((copy, leaving.nbytes))
        self._release(self._most)

    def add_to(self, trained: Trained, gradient: Tensor) -> None:
        """Add what is here to a new gradient; nothing is here afterwards."""
        self._made.append(trained)
        self._come_back(trained)
        for following in self._following(trained):
            self._come_back(following)
        if trained in self._coming:
            sum_so_far, copy = self._coming.pop(trained)
            copy.wait()
            gradient.add_(sum_so_far)

    def take_back(self, trained: Trained) -> Tensor:
        """What is here, on the GPU; nothing is here afterwards."""
        self._come_back(trained)
        gradient, copy = self._coming.pop(trained)
        copy.wait()
        return gradient

    def slot(self, trained: Trained) -> tuple[Tensor, Copy]:
        """Where in host memory a gradient is, once the copy is done."""
        return self._slots[trained], self._filled[trained][1]

    def dtype(self, trained: Trained) -> torch.dtype:
        """The type of a gradient that is here."""
        return self._filled[trained][0]

    def bring(self, rooms: Mapping[Piece, Tensor]) -> Copy:
        """Begin to bring pieces of gradients to the GPU, into these; they stay here as well."""
        pairs: list[tuple[Tensor, Tensor]] = []
        after: list[Copy] = []
        from_disk: list[Copy] = []
        for piece, room in rooms.items():
            if self.disk is not None and piece.trained in self.disk:
                from_disk += self.disk.get(piece, room)
            else:
                slot, copy = self.slot(piece.trained)
                pairs.append((piece.of(slot), room))
                after.append(copy)
        in_memory = [self._link.to_gpu_all(pairs, after)] if pairs else []
        return Copies([*in_memory, *from_disk])

    def used(self, trained: Trained) -> None:
        """A gradient is not needed any more."""
        self._filled.pop(trained, None)

    def release(self) -> None:
        """Wait for those on their way out; they take no more memory of the GPU."""
        self._release(-1)

    def forget(self, but: Collection[Trained] = ()) -> None:
        """Drop all of them, but for those that a step still needs."""
        self.release()
        for _, copy in self._coming.values():
            with contextlib.suppress(OomphError):  # nobody needs it any more
                copy.wait()
        self._coming.clear()
        self._filled = {trained: own for trained, own in self._filled.items() if trained in but}
        self._made.clear()

    def close(self) -> None:
        """Drop all of them and give host memory and disk back."""
        self.forget()
        self._slots.clear()
        if self.disk is not None:
            self.disk.close()
            self.disk = None
        self._order.clear()
        self._places.clear()

    def _following(self, trained: Trained) -> list[Trained]:
        at = self._places.get(trained)
        return [] if at is None else self._order[at + 1 : at + 1 + _AHEAD]

    def _come_back(self, trained: Trained) -> None:
        if trained in self._filled:
            there = gpu_like(trained.like, trained.leaf.device, self.dtype(trained))
            self._coming[trained] = there, self.bring({whole(trained): there})
            del self._filled[trained]

    def _slot(self, trained: Trained, dtype: torch.dtype) -> Tensor:
        slot = self._slots.get(trained)
        if slot is None or slot.dtype != dtype:
            slot = self._slots[trained] = host_tensor(self._link, trained.like, dtype)
        return slot

    def _release(self, most: int) -> None:
        while self._leaving and sum(nbytes for _, nbytes in self._leaving) > most:
            copy, _ = self._leaving.popleft()
            copy.wait()
