"""Weights of blocks on the disk, where host memory has no room for all that are off the GPU.

Each such block has a slot (`oomph.host.slots`), taken before anything moves, so that a disk that is
too small says so then. It is written once; after that the disk only reads. A round of blocks is
announced at a time, in the order they are expected to run, and read as far ahead as the ring of
buffers reaches. Blocks that run in another order are announced anew: that costs time, no number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from oomph.errors import BadInput
from oomph.host.limits import check_host_memory
from oomph.host.link import Copy
from oomph.host.slots import OpenSlots

#: One that goes to the GPU, one that the disk fills, and one that nothing was promised to.
BUFFERS = 3


@dataclass(frozen=True, kw_only=True)
class OnDisk:
    """Which of the blocks that are off the GPU are on the disk, and how its slots are opened."""

    blocks: Sequence[str]
    open_slots: OpenSlots


class ColdWeights:
    """The bytes of some blocks, by the blocks' paths; `sizes` says how many each has."""

    def __init__(self, sizes: Mapping[str, int], open_slots: OpenSlots) -> None:
        self.sizes = sizes
        self._store = open_slots(max(sizes.values()), BUFFERS)
        try:
            self._slots = {path: self._store.slot(nbytes) for path, nbytes in sizes.items()}
        except BaseException:
            self._store.close()
            raise
        #: Those that will be got next, as the store was told.
        self._announced: deque[str] = deque()
        #: Blocks that are being saved, read once for all of their parameters.
        self.saving: dict[str, Tensor] = {}

    def __contains__(self, path: object) -> bool:
        return path in self.sizes

    def write(self, path: str, memory: Tensor) -> None:
        """Put a block's bytes there; the memory is not needed any more afterwards."""
        self._store.put(self._slots[path], memory).finish()

    def get(self, path: str, memory: Tensor, following: Callable[[], Sequence[str]]) -> Copy:
        """Begin to bring a block's bytes; `following` are the others that will be got next."""
        if not self._announced or self._announced[0] != path:
            self._announce([path, *following()])
        self._announced.popleft()
        copy = self._store.get(self._slots[path], memory)
        if not self._announced:
            self._announce(following())
        return copy

    def read(self, path: str) -> Tensor:
        """A block's bytes, in host memory of their own."""
        check_host_memory(self.sizes[path], f"reading the weights of {path} from the disk")
        with torch.inference_mode(False):  # it may outlive that
            memory = torch.empty(self.sizes[path], dtype=torch.uint8)
        self._store.get(self._slots[path], memory).finish()
        return memory

    def read_once_when_saved(self, path: str, block: nn.Module) -> list[RemovableHandle]:
        """Have a block read once, in `saving`, while the state of it as a whole is gathered."""

        def before(module: nn.Module, *_: Any) -> None:
            if module is block:
                self.saving[path] = self.read(path)

        def after(module: nn.Module, *_: Any) -> None:
            if module is block:
                self.saving.pop(path, None)

        return [
            block.register_state_dict_pre_hook(before),
            block.register_state_dict_post_hook(after),
        ]

    def close(self) -> None:
        """Give the room on the disk and the buffers back."""
        self._store.close()

    def _announce(self, paths: Sequence[str]) -> None:
        self._announced = deque(paths)
        self._store.announce([self._slots[path] for path in paths])


def refuse_to_load(owner: nn.Module) -> RemovableHandle:
    """Let nothing be loaded into a module with weights on the disk, not even a part."""

    def before_load(module: nn.Module, *_: Any) -> None:
        if module is owner:
            raise BadInput(
                f"weights of this {type(module).__name__} are on the disk, which is only read:"
                " undo, load and apply again"
            )

    handle: RemovableHandle = owner.register_load_state_dict_pre_hook(before_load)
    return handle
