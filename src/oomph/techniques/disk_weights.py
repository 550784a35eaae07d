"""Block weights on the disk, for when host memory cannot hold all offloaded weights.

Each such block has a slot (`oomph.memory.numbered_store`), or one for each of its separately
stepped pieces. Slots are taken before anything moves, so that a disk that is too small raises then.
A round of blocks is announced at a time, in the order they are expected to run, and read ahead as
far as the ring of buffers reaches. Blocks that run in another order are announced again; that costs
time and does not change results.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from oomph.errors import BadInput, OomphError
from oomph.memory.limits import check_host_memory
from oomph.memory.link import Copy
from oomph.memory.numbered_store import OpenStore
from oomph.techniques.weight_blocks import Place

#: One being copied to the GPU, one being filled from the disk, and one free.
BUFFERS = 3
#: The same for pieces, several of which are fetched and written at a time.
BUFFERS_OF_PIECES = 6
#: Trained parameters with fewer bytes than this are not worth a slot.
LEAST = 1 << 20

#: The elements of each of the pieces that a parameter is stepped in.
Cuts = tuple[range, ...]
Cut = Callable[[nn.Parameter], Cuts]
#: The paths of the blocks that will be fetched next.
Following = Callable[[], Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class OnDisk:
    """Which of the offloaded blocks are on the disk, and how to open the slots."""

    blocks: Sequence[str]
    open_store: OpenStore
    cut: Cut | None = None
    """How their trained weights are cut into pieces; None if the weights are only read."""

    def takes(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter of such a block goes to the disk with it."""
        return self.cut is None or parameter.nbytes >= max(LEAST, 1)


class DiskWeights:
    """The bytes of some blocks, by block path; each of a block's `parts` has a slot."""

    def __init__(
        self, parts: Mapping[str, Sequence[range]], open_store: OpenStore, buffers: int = BUFFERS
    ) -> None:
        self._parts = parts
        self._store = open_store(max(len(part) for own in parts.values() for part in own), buffers)
        try:
            #: By the path of a block and the first byte of a part.
            self._slots = {
                (path, part.start): self._store.slot(len(part))
                for path, own in parts.items()
                for part in own
            }
        except BaseException:
            self._store.close()
            raise
        #: The slots announced to the store as those that will be fetched next.
        self._announced: deque[int] = deque()
        #: By slot: the last copies from it and to it, until they are known to be done.
        self._gets: dict[int, Copy] = {}
        self._puts: dict[int, Copy] = {}
        #: The number of puts so far; by slot, that number right after its last put.
        self.puts = 0
        self._last_put: dict[int, int] = {}
        #: Blocks whose state is being saved, each read once for all of its parameters.
        self.saving: dict[str, Tensor] = {}

    def __contains__(self, path: object) -> bool:
        return path in self._parts

    def put(self, path: str, at: int, source: Tensor) -> Copy:
        """Begin to write the part of a block that starts at byte `at` to the disk."""
        slot = self._slots[path, at]
        self._puts[slot] = copy = self._store.put(slot, source)
        self.puts += 1
        self._last_put[slot] = self.puts
        return copy

    def write(self, path: str, place: Place, numbers: Tensor) -> None:
        """Write a whole parameter to the disk and wait for it, on whatever device it is now."""
        self.finish()  # host-to-host copies do not wait for pending ones
        flat = place.flat(numbers).view(torch.uint8)
        for part in self._with(path, place.span):
            piece = flat[part.start - place.offset : part.stop - place.offset]
            self.put(path, part.start, piece).wait()
        self.finish()

    def was_put_since(self, puts: int, path: str, at: int) -> bool:
        """Whether a part was written since the put count was `puts`."""
        return self._last_put[self._slots[path, at]] > puts

    def get(
        self, path: str, memory: Tensor, inside: Iterable[range], following: Following
    ) -> Iterator[Copy]:
        """Begin to fetch, one by one, the parts of a block that overlap these byte ranges."""
        parts = list(dict.fromkeys(part for some in inside for part in self._with(path, some)))
        targets = {self._slots[path, p.start]: memory[p.start : p.stop] for p in parts}
        return self._get(targets, lambda: self._slots_of(following()))

    def get_part(self, path: str, at: int, target: Tensor, following: Following) -> Copy:
        """Begin to fetch the part that starts at byte `at`; the block's later parts are next."""

        def expected() -> list[int]:
            rest = [self._slots[path, part.start] for part in self._parts[path] if part.start > at]
            return rest + self._slots_of(following())

        (copy,) = self._get({self._slots[path, at]: target}, expected)
        return copy

    def read(self, path: str, inside: range | None = None) -> Tensor:
        """A block's bytes, or a range of them, in new host memory."""
        self.finish()  # host-to-host copies do not wait for pending ones
        inside = inside or range(self._parts[path][-1].stop)
        parts = self._with(path, inside)
        start, stop = min(inside.start, parts[0].start), max(inside.stop, parts[-1].stop)
        check_host_memory(stop - start, f"reading the weights of {path} from the disk")
        with torch.inference_mode(False):  # the memory may outlive inference mode
            memory = torch.empty(stop - start, dtype=torch.uint8, device="cpu")
        for part in parts:
            target = memory[part.start - start : part.stop - start]
            self._store.get(self._slots[path, part.start], target).finish()
        found = memory[inside.start - start : inside.stop - start]
        return found if found.nbytes == memory.nbytes else found.clone()

    def read_once_when_saved(self, path: str, block: nn.Module) -> list[RemovableHandle]:
        """Read a block once, into `saving`, while its whole state dict is gathered."""

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

    def finish(self) -> None:
        """Wait for all copies under way; raises the error of a failed put, once."""
        gets, self._gets = self._gets, {}
        puts, self._puts = self._puts, {}
        for copy in gets.values():
            with contextlib.suppress(OomphError):  # already raised to the code that waited for it
                copy.finish()
        for copy in puts.values():
            copy.finish()

    def close(self) -> None:
        """Release the disk space and the buffers."""
        self._store.close()

    def _get(self, targets: Mapping[int, Tensor], then: Callable[[], list[int]]) -> Iterator[Copy]:
        wanted = list(targets)
        if list(islice(self._announced, len(wanted))) != wanted:
            self._announce([*wanted, *then()])
        for slot, target in targets.items():
            self._announced.popleft()
            self._gets[slot] = copy = self._store.get(slot, target)
            yield copy
        if not self._announced:
            self._announce(then())

    def _announce(self, slots: Sequence[int]) -> None:
        self._announced = deque(slots)
        self._store.announce(slots)

    def _slots_of(self, paths: Iterable[str]) -> list[int]:
        return [self._slots[path, part.start] for path in paths for part in self._parts[path]]

    def _with(self, path: str, some: range) -> list[range]:
        """The parts of a block that overlap this byte range."""
        return [p for p in self._parts[path] if p.start < some.stop and some.start < p.stop]


def parts_of(places: Mapping[nn.Parameter, Place], cuts: Mapping[Tensor, Cuts]) -> list[range]:
    """The byte range of each piece of a block's parameters."""
    return [
        range(place.byte_of(piece.start), place.byte_of(piece.stop))
        for parameter, place in places.items()
        for piece in cuts[parameter]
    ]


def refuse_to_load(owner: nn.Module) -> RemovableHandle:
    """Refuse to load a state dict, even a partial one, into a module with weights on the disk."""

    def before_load(module: nn.Module, *_: Any) -> None:
        if module is owner:
            raise BadInput(
                f"weights of this {type(module).__name__} are on the disk, which is only read:"
                " undo, load and apply again"
            )

    handle: RemovableHandle = owner.register_load_state_dict_pre_hook(before_load)
    return handle
