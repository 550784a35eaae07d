"""Weights of blocks on the disk, where host memory has no room for all that are off the GPU.

Each such block has a slot (`oomph.host.slots`), or one for each piece of it that is stepped by
itself, taken before anything moves, so that a disk that is too small says so then. A round of
blocks is announced at a time, in the order they are expected to run, and read as far ahead as the
ring of buffers reaches. Blocks that run in another order are announced anew: that costs time, no
number.
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
from oomph.host.limits import check_host_memory
from oomph.host.link import Copy
from oomph.host.slots import OpenSlots
from oomph.techniques.weight_blocks import Place

#: One that goes to the GPU, one that the disk fills, and one that nothing was promised to.
BUFFERS = 3
#: The same for pieces, of which several come and leave at a time.
BUFFERS_OF_PIECES = 6
#: Smaller parameters that are trained are not worth a slot: bytes.
LEAST = 1 << 20

#: The elements of each of the pieces that a parameter is stepped in.
Cuts = tuple[range, ...]
Cut = Callable[[nn.Parameter], Cuts]
#: The paths of the blocks that will be got next.
Following = Callable[[], Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class OnDisk:
    """Which of the blocks that are off the GPU are on the disk, and how its slots are opened."""

    blocks: Sequence[str]
    open_slots: OpenSlots
    cut: Cut | None = None
    """How their weights are trained; without it they are only read."""

    def takes(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter of such a block goes to the disk with it."""
        return self.cut is None or parameter.nbytes >= max(LEAST, 1)


class ColdWeights:
    """The bytes of some blocks, by the blocks' paths; `parts` are those that have a slot each."""

    def __init__(
        self, parts: Mapping[str, Sequence[range]], open_slots: OpenSlots, buffers: int = BUFFERS
    ) -> None:
        self._parts = parts
        self._store = open_slots(max(len(part) for own in parts.values() for part in own), buffers)
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
        #: Those that will be got next, as the store was told.
        self._announced: deque[int] = deque()
        #: By slot: the last copies from it and to it, until the host knows that they are done.
        self._gets: dict[int, Copy] = {}
        self._puts: dict[int, Copy] = {}
        #: How many puts there were so far; by slot, how many there were with its last.
        self.puts = 0
        self._last_put: dict[int, int] = {}
        #: Blocks that are being saved, read once for all of their parameters.
        self.saving: dict[str, Tensor] = {}

    def __contains__(self, path: object) -> bool:
        return path in self._parts

    def put(self, path: str, at: int, source: Tensor) -> Copy:
        """Let the part of a block leave for the disk that begins at this byte."""
        slot = self._slots[path, at]
        self._puts[slot] = copy = self._store.put(slot, source)
        self.puts += 1
        self._last_put[slot] = self.puts
        return copy

    def write(self, path: str, place: Place, numbers: Tensor) -> None:
        """Put all of a parameter there at once, wherever its numbers are now."""
        self.finish()  # what goes from host to host waits for nobody
        flat = place.flat(numbers).view(torch.uint8)
        for part in self._with(path, place.span):
            piece = flat[part.start - place.offset : part.stop - place.offset]
            self.put(path, part.start, piece).wait()
        self.finish()

    def was_put_since(self, puts: int, path: str, at: int) -> bool:
        """Whether a part has other bytes than when there were so many puts."""
        return self._last_put[self._slots[path, at]] > puts

    def get(
        self, path: str, memory: Tensor, inside: Iterable[range], following: Following
    ) -> Iterator[Copy]:
        """Begin to bring the parts of a block that have some of these bytes, one by one."""
        parts = list(dict.fromkeys(part for some in inside for part in self._with(path, some)))
        targets = {self._slots[path, p.start]: memory[p.start : p.stop] for p in parts}
        return self._get(targets, lambda: self._slots_of(following()))

    def get_part(self, path: str, at: int, target: Tensor, following: Following) -> Copy:
        """Begin to bring the part that begins at this byte, which those behind it will follow."""

        def expected() -> list[int]:
            rest = [self._slots[path, part.start] for part in self._parts[path] if part.start > at]
            return rest + self._slots_of(following())

        (copy,) = self._get({self._slots[path, at]: target}, expected)
        return copy

    def read(self, path: str, inside: range | None = None) -> Tensor:
        """A block's bytes, or some of them, in host memory of their own."""
        self.finish()  # what goes from host to host waits for nobody
        inside = inside or range(self._parts[path][-1].stop)
        parts = self._with(path, inside)
        start, stop = min(inside.start, parts[0].start), max(inside.stop, parts[-1].stop)
        check_host_memory(stop - start, f"reading the weights of {path} from the disk")
        with torch.inference_mode(False):  # it may outlive that
            memory = torch.empty(stop - start, dtype=torch.uint8)
        for part in parts:
            target = memory[part.start - start : part.stop - start]
            self._store.get(self._slots[path, part.start], target).finish()
        found = memory[inside.start - start : inside.stop - start]
        return found if found.nbytes == memory.nbytes else found.clone()

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

    def finish(self) -> None:
        """The host waits until nothing is under way; raises what went wrong with a put, once."""
        gets, self._gets = self._gets, {}
        puts, self._puts = self._puts, {}
        for copy in gets.values():
            with contextlib.suppress(OomphError):  # whoever waited for it heard of it
                copy.finish()
        for copy in puts.values():
            copy.finish()

    def close(self) -> None:
        """Give the room on the disk and the buffers back."""
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
        """The parts of a block that have some of these bytes."""
        return [p for p in self._parts[path] if p.start < some.stop and some.start < p.stop]


def parts_of(places: Mapping[nn.Parameter, Place], cuts: Mapping[Tensor, Cuts]) -> list[range]:
    """The bytes of each piece of a block's parameters."""
    return [
        range(place.byte_of(piece.start), place.byte_of(piece.stop))
        for parameter, place in places.items()
        for piece in cuts[parameter]
    ]


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
