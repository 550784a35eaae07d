"""Staging: reused host memory through which batches pass on their way to the device.

The GPU can copy asynchronously only from pinned memory, and pinning takes longer than copying. So
each slot keeps its memory, and grows when a larger batch comes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oomph.memory.link import Copy, Link
from oomph.torch_compat.pytree import tree_flatten, tree_unflatten

#: Alignment of tensors, which suits every dtype.
ALIGNMENT = 64


class Slot:
    """Host memory for one batch at a time."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._memory: Tensor | None = None
        #: Copies that read from it.
        self._copies: list[Copy] = []

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return 0 if self._memory is None else self._memory.numel()

    def stage(self, batch: Any) -> Any:
        """The batch with its tensors copied here; first waits until the last batch was read.

        Tensors already on a device, and other objects, stay as they are.
        """
        self.finish()
        leaves, structure = tree_flatten(batch)
        staged = {at: leaf for at, leaf in enumerate(leaves) if _on_host(leaf)}
        sizes = [_aligned(leaf.numel() * leaf.element_size()) for leaf in staged.values()]
        memory = self._room_for(sum(sizes))
        start = 0
        for (at, leaf), size in zip(staged.items(), sizes, strict=True):
            here = memory[start : start + leaf.numel() * leaf.element_size()].view(leaf.dtype)
            leaves[at] = here.as_strided(leaf.shape, _dense_strides(leaf)).copy_(leaf.detach())
            start += size
        return tree_unflatten(leaves, structure)

    def send(self, staged: Any, device: torch.device) -> tuple[Any, list[Copy]]:
        """Start copying; the batch on the device may be used once its copies were waited for."""
        leaves, structure = tree_flatten(staged)
        try:
            for at, leaf in enumerate(leaves):
                if _on_host(leaf):
                    leaves[at] = torch.empty_like(leaf, device=device)
                    self._copies.append(self._link.to_gpu(leaf, leaves[at]))
        except BaseException:
            self.finish()  # nothing is freed that a copy still writes to
            raise
        return tree_unflatten(leaves, structure), list(self._copies)

    def finish(self) -> None:
        """Wait for the copies from this slot."""
        for copy in self._copies:
            copy.finish()
        self._copies = []

    def _room_for(self, nbytes: int) -> Tensor:
        if self._memory is None or self._memory.numel() < nbytes:
            grown = max(nbytes, 2 * self.nbytes)  # so that growing batches do not pin each time
            self._memory = None
            self._memory = self._link.host_memory(grown)
        return self._memory


def _on_host(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "cpu"


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _dense_strides(leaf: Tensor) -> tuple[int, ...]:
    """The tensor's own strides if they leave no gaps, as channels-last; else contiguous ones."""
    return torch.empty_like(leaf, device="meta").stride()
