"""Gradients that are offloaded as soon as a backward has made them.

They are kept in host memory, or on the disk (`DiskGradients`) if they have slots there. Gradients
that the host's cores step are always in host memory.

If several micro-batches add to a gradient, each fetches the sum so far, adds to it on the GPU as
PyTorch would, and offloads it again. Sums are prefetched, because each backward makes gradients in
the same order.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from oomph.errors import OomphError
from oomph.memory.link import Copies, Copy, HostWork, Link
from oomph.techniques.disk_gradients import DiskGradients
from oomph.techniques.host_tensors import gpu_like, host_tensor
from oomph.techniques.step_buckets import Piece, Trained, whole

#: How many gradients are prefetched.
_AHEAD = 2


class LeavingGradients:
    """The offloaded gradients; at most `in_flight` bytes may be on their way out."""

    def __init__(self, link: Link, in_flight: int) -> None:
        self._link = link
        self._most = in_flight
        #: The gradients on the disk, if any.
        self.disk: DiskGradients | None = None
        #: Host memory, by parameter.
        self._slots: dict[Trained, Tensor] = {}
        #: By parameter with an offloaded gradient: its dtype, and the copy that offloads it.
        self._filled: dict[Trained, tuple[torch.dtype, Copy]] = {}
        self._leaving: deque[tuple[Copy, int]] = deque()
        self._coming: dict[Trained, tuple[Tensor, Copy]] = {}
        #: The last copy to the GPU, which implies all earlier ones.
        self._last_brought: Copy | None = None
        self._freeing: HostWork | None = None
        #: The order in which the last backward made gradients, and this one's so far (`_made`).
        self._order: list[Trained] = []
        self._places: dict[Trained, int] = {}
        self._made: dict[Trained, None] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no gradient is offloaded."""
        return not self._filled and not self._coming

    def __contains__(self, trained: Trained) -> bool:
        return trained in self._filled or trained in self._coming

    def begin_backward(self) -> None:
        """Begin another backward: the last one's order of gradients becomes the expected one."""
        if self._freeing is not None and self._freeing.is_done():
            self._freeing = self._last_brought = None
        if self._made:
            self._order, self._made = list(self._made), {}
            self._places = {trained: at for at, trained in enumerate(self._order)}

    def send(self, trained: Trained, gradient: Tensor, dtype: torch.dtype) -> None:
        """Offload a gradient as `dtype`; it must not be written to any more."""
        leaving = gradient.to(dtype)
        if self.disk is not None and trained in self.disk:
            copy = self.disk.put(trained, leaving)
        else:
            copy = self._link.to_host(leaving, self._slot(trained, dtype))
        self._filled[trained] = dtype, copy
        self._leaving.append((copy, leaving.nbytes))
        self._release(self._most)

    def add_to(self, trained: Trained, gradient: Tensor) -> None:
        """Add the offloaded sum to a new gradient; no sum is kept here afterwards."""
        self._made[trained] = None
        self._come_back(trained)
        for following in self._following(trained):
            self._come_back(following)
        if trained in self._coming:
            sum_so_far, copy = self._coming.pop(trained)
            copy.wait()
            gradient.add_(sum_so_far)

    def take_back(self, trained: Trained) -> Tensor:
        """Fetch the sum to the GPU; no sum is kept here afterwards."""
        self._come_back(trained)
        gradient, copy = self._coming.pop(trained)
        copy.wait()
        return gradient

    def slot(self, trained: Trained) -> tuple[Tensor, Copy]:
        """A gradient's host memory, and the copy after which it is there."""
        return self._slots[trained], self._filled[trained][1]

    def dtype(self, trained: Trained) -> torch.dtype:
        """The dtype of an offloaded gradient."""
        return self._filled[trained][0]

    def bring(self, rooms: Mapping[Piece, Tensor]) -> Copy:
        """Begin to copy pieces of gradients into these GPU tensors; they also stay offloaded."""
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
        self._last_brought = in_memory[0] if in_memory else self._last_brought
        return Copies([*in_memory, *from_disk])

    def used(self, trained: Trained) -> None:
        """Drop a gradient that is not needed any more."""
        self._filled.pop(trained, None)

    def release(self) -> None:
        """Wait for gradients on their way out, so that their GPU memory is free."""
        self._release(-1)

    def forget(self, but: Collection[Trained] = ()) -> None:
        """Drop all gradients except those in `but`, which a step still needs."""
        self.release()
        for _, copy in self._coming.values():
            with contextlib.suppress(OomphError):  # it is not needed any more
                copy.wait()
        self._coming.clear()
        self._filled = {trained: own for trained, own in self._filled.items() if trained in but}
        self._made.clear()

    def free_all_but(self, leaving: Collection[Trained]) -> None:
        """Release host memory of gradients that are not among those that leave in each step."""
        spare = [slot for trained, slot in self._slots.items() if trained not in leaving]
        self._slots = {trained: own for trained, own in self._slots.items() if trained in leaving}
        # They may still be on their way to the GPU, for which the host does not wait here.
        after = [self._last_brought] if self._last_brought is not None else []
        self._freeing = self._link.host_work(spare.clear, 0, after)

    def close(self) -> None:
        """Drop all gradients and release host memory and disk space."""
        self.forget()
        if self._freeing is not None:
            self._freeing.finish()
            self._freeing = None
        self._slots.clear()
        if self.disk is not None:
            self.disk.close()
            self.disk = None
        self._order.clear()
        self._places.clear()

    def _following(self, trained: Trained) -> list[Trained]:
        """The gradients this backward makes next, if it repeats the order of the last one."""
        at = self._places.get(trained)
        following = [] if at is None else self._order[at + 1 : at + 1 + _AHEAD]
        # Gradients already made are complete: a step may read them where they are.
        return [one for one in following if one not in self._made]

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
