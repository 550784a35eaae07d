"""Export a predicted run as a memory snapshot for PyTorch's memory_viz page.

The dictionary has the format of `torch.cuda.memory._snapshot()`: the segments at the end, and the
allocator's actions until then. It is written as a pickle because the page accepts nothing else, and
contains only plain dictionaries, lists, strings and numbers. oomph never reads a pickle (rule 8).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

from oomph.errors import BadInput
from oomph.rehearsal.allocator import Allocator
from oomph.rehearsal.allocator.driver import DriverAddresses
from oomph.rehearsal.timeline import Block
from oomph.report.history import Happening, History

#: The only protocol that the page reads; later ones encode objects in ways it does not know.
PROTOCOL = 4
_POOL = (0, 0)

Entry = dict[str, Any]
Range = tuple[int, int]
Frames = list[dict[str, Any]]


def memory_viz_pickle(history: History) -> bytes:
    """The snapshot as a file for pytorch.org/memory_viz."""
    return pickle.dumps(snapshot_of(history), protocol=PROTOCOL)


def snapshot_of(history: History) -> dict[str, Any]:
    """What `torch.cuda.memory._snapshot()` would have returned at the end of the last phase."""
    if history.settings is None:
        raise BadInput("memory_viz shows CUDA's allocator: rehearse for a GPU, not for the CPU")
    recording = _Recording(history)
    return {
        "segments": recording.segments(),
        "device_traces": [recording.trace],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": history.settings.as_text(),
            "expandable_segments": history.settings.expandable_segments,
        },
        "external_annotations": [],
    }


class _Driver(DriverAddresses):
    """Logs the segments that the allocator takes and gives back."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, int, int]] = []

    def take(self, size: int) -> int:
        """The address of a new segment."""
        address = super().take(size)
        self.log.append(("segment_alloc", address, size))
        return address

    def give_back(self, address: int, size: int) -> None:
        """Free a segment."""
        super().give_back(address, size)
        self.log.append(("segment_free", address, size))


class _Recording:
    """A history, replayed until its last phase ends."""

    def __init__(self, history: History) -> None:
        assert history.settings is not None
        self._allocator = Allocator(history.settings)
        self._driver = self._allocator.driver = _Driver()
        self._mapped: list[Range] = []
        self._reserved = 0
        self._alive: dict[int, Block] = {}
        self._frames: dict[tuple[str, ...], Frames] = {}
        # The page colours entries by category if they have one, and requires one named unknown.
        self.trace: list[Entry] = [
            {**_entry("snapshot", 0, 0, 0, [], 0), "category": "unknown"},
        ]
        for one in history.walk(self._allocator):
            if one.block.size:
                self._add(one)

    def _add(self, one: Happening) -> None:
        block, frames = one.block, self._frames_of(one.block)
        for action, address, size in self._taken_from_driver(one.reserved):
            entry = _entry(action, address, size, block.stream, frames, one.event)
            self.trace.append({**entry, "category": "unknown"})
        actions = ("alloc",) if one.is_birth else ("free_requested", "free_completed")
        for action in actions:
            entry = _entry(action, one.address, block.size, block.stream, frames, one.event)
            self.trace.append({**entry, "category": str(block.category)})
        if one.is_birth:
            self._alive[one.address] = block
        else:
            del self._alive[one.address]

    def _taken_from_driver(self, reserved: int) -> list[tuple[str, int, int]]:
        taken, self._driver.log = self._driver.log, []
        if self._allocator.settings.expandable_segments and reserved != self._reserved:
            taken += self._mapped_and_unmapped()
        self._reserved = reserved
        return taken

    def _mapped_and_unmapped(self) -> Iterator[tuple[str, int, int]]:
        """The ranges of expandable segments that were mapped or unmapped since the last call."""
        before, now = self._mapped, [(s.address, s.size) for s in self._allocator.segments()]
        for address, size in _outside(before, now):
            yield "segment_unmap", address, size
        for address, size in _outside(now, before):
            yield "segment_map", address, size
        self._mapped = now

    def segments(self) -> list[Entry]:
        """The segments that are reserved from the driver, with their blocks."""
        return [
            {
                "device": 0,
                "address": segment.address,
                "total_size": segment.size,
                "allocated_size": sum(b.size for b in segment.blocks if b.allocated),
                "active_size": sum(b.size for b in segment.blocks if b.allocated),
                "requested_size": sum(
                    self._alive[segment.address + b.offset].size
                    for b in segment.blocks
                    if b.allocated
                ),
                "stream": segment.stream,
                "segment_type": segment.pool,
                "segment_pool_id": _POOL,
                "is_expandable": self._allocator.settings.expandable_segments,
                "frames": [],
                "blocks": [
                    self._block(segment.address + b.offset, b.size, b.allocated)
                    for b in segment.blocks
                ],
            }
            for segment in self._allocator.segments()
        ]

    def _block(self, address: int, size: int, allocated: bool) -> Entry:
        block = self._alive[address] if allocated else None
        return {
            "address": address,
            "size": size,
            "requested_size": block.size if block is not None else 0,
            "state": "active_allocated" if block is not None else "inactive",
            "frames": self._frames_of(block) if block is not None else [],
        }

    def _frames_of(self, block: Block) -> Frames:
        """Op and module in place of a real snapshot's stack frames; equal ones share a list."""
        key = (block.op, block.module, block.phase, str(block.category))
        if key not in self._frames:
            self._frames[key] = [
                {"name": block.op, "filename": block.module or "(outside the model)", "line": 0},
                {"name": str(block.category), "filename": block.phase or "oomph", "line": 0},
            ]
        return self._frames[key]


def _outside(ranges: list[Range], others: list[Range]) -> Iterator[Range]:
    """The parts of `ranges` that no range of `others` covers; both lists are sorted."""
    for address, size in ranges:
        start, stop = address, address + size
        for other, length in others:
            if other + length <= start or other >= stop:
                continue
            if other > start:
                yield start, other - start
            start = other + length
        if start < stop:
            yield start, stop - start


def _entry(action: str, address: int, size: int, stream: int, frames: Frames, event: int) -> Entry:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": stream,
        "frames": frames,
        "time_us": event,
        "pool_id": _POOL,
    }
