"""Gradients that leave the GPU as soon as a backward has made them, and wait on the host.

Where several micro-batches add to a gradient, what there is of it comes back for each, is added to
on the GPU as PyTorch would, and leaves again. It comes back before it is needed: gradients are made
in the same order in each backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

import torch
from torch import Tensor

from oomph.host.link import Copy, Link
from oomph.techniques.host_tensors import gpu_like, host_tensor
from oomph.techniques.step_buckets import Trained

#: How many gradients come back before they are added to.
_AHEAD = 2


class LeavingGradients:
    """What of the gradients is on the host; `in_flight` bytes may be on their way there."""

    def __init__(self, link: Link, in_flight: int) -> None:
        self._link = link
        self._most = in_flight
        self._slots: dict[Trained, Tensor] = {}
        #: By parameter whose slot holds a gradient: the copy that brought it.
        self._filled: dict[Trained, Copy] = {}
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
        slot = self._slots.get(trained)
        if slot is None or slot.dtype != dtype:
            slot = self._slots[trained] = host_tensor(self._link, trained.like, dtype)
        copy = self._link.to_host(gradient.to(dtype), slot)
        self._filled[trained] = copy
        self._leaving.append((copy, slot.nbytes))
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
        """Where a gradient is, once the copy is done."""
        return self._slots[trained], self._filled[trained]

    def used(self, trained: Trained) -> None:
        """A gradient is not needed any more."""
        self._filled.pop(trained, None)

    def release(self) -> None:
        """Wait for those on their way to the host; they take no more memory of the GPU."""
        self._release(-1)

    def forget(self, but: Collection[Trained] = ()) -> None:
        """Drop all of them, but for those that a step still needs."""
        self.release()
        for _, copy in self._coming.values():
            copy.wait()
        self._coming.clear()
        self._filled = {trained: c for trained, c in self._filled.items() if trained in but}
        self._made.clear()

    def close(self) -> None:
        """Drop all of them and give the host memory back."""
        self.forget()
        self._slots.clear()
        self._order.clear()
        self._places.clear()

    def _following(self, trained: Trained) -> list[Trained]:
        at = self._places.get(trained)
        return [] if at is None else self._order[at + 1 : at + 1 + _AHEAD]

    def _come_back(self, trained: Trained) -> None:
        if trained in self._filled:
            slot, copy = self.slot(trained)
            there = gpu_like(slot, trained.leaf.device)
            self._coming[trained] = there, self._link.to_gpu(slot, there, after=[copy])
            del self._filled[trained]

    def _release(self, most: int) -> None:
        while self._leaving and sum(nbytes for _, nbytes in self._leaving) > most:
            copy, _ = self._leaving.popleft()
            copy.wait()
