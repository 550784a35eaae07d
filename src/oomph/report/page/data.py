"""The data that the page's script draws, as compact JSON: repeated values are written once."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from oomph.rehearsal.timeline import Block, Span
from oomph.report.history import History
from oomph.report.page.samples import Samples, take_samples, thin
from oomph.report.page.strips import model_blocks_of, parts_of, phases_of

#: Number of time intervals that each keep their peaks; more than a wide screen has columns.
STRETCHES = 1500
#: The largest allocations, up to this many, are listed one by one.
MOST_BLOCKS = 100_000


def memory_data(history: History, peak: int | None = None) -> dict[str, Any]:
    """Memory over time, the phases and blocks that ran, and every allocation.

    `peak` is the event of the peak, by default the one with the most allocated bytes.
    """
    samples = take_samples(history)
    if not len(samples.events):
        return {}
    if peak is None:
        peak = int(samples.events[samples.allocated.argmax()])
    phases = phases_of(history.timeline)
    tops = [_top(samples, phase) for phase in phases]
    thinned = thin(samples, STRETCHES, keep=[peak, *tops])
    return {
        "stop": history.stop,
        "peak": peak,
        "overhead": history.overhead,
        "on_gpu": history.settings is not None,
        "categories": list(thinned.categories),
        "events": differences(thinned.events.tolist()),
        "sizes": [differences(row.tolist()) for row in thinned.sizes],
        "allocated": differences(thinned.allocated.tolist()),
        "reserved": differences(thinned.reserved.tolist()),
        "phases": [[*_piece(phase), top] for phase, top in zip(phases, tops, strict=True)],
        "parts": [_piece(part) for part in parts_of(history.timeline)],
        "model_blocks": _named_pieces(model_blocks_of(history.timeline)),
        "allocations": _allocations(history.timeline.blocks, thinned.categories, history.stop),
    }


def _top(samples: Samples, phase: Span) -> int:
    """The event of a phase with the most allocated bytes."""
    first, end = samples.events.searchsorted([phase.start, phase.stop])
    # A phase without an event of its own uses the last event before it.
    first, end = (first, end) if end > first else (max(first - 1, 0), max(first, 1))
    return int(samples.events[first + samples.allocated[first:end].argmax()])


def _piece(span: Span) -> list[Any]:
    return [span.name, span.start, span.stop]


def _named_pieces(spans: Sequence[Span]) -> dict[str, Any]:
    names = _Once[str]()
    pieces = [[names.place(span.name), span.start, span.stop] for span in spans]
    return {"names": names.values, "pieces": pieces}


def _allocations(blocks: Sequence[Block], categories: Sequence[str], stop: int) -> dict[str, Any]:
    """The blocks as columns; only the largest if there are too many."""
    born = [block for block in blocks if block.birth < stop]
    listed = born
    if len(born) > MOST_BLOCKS:
        largest = heapq.nlargest(MOST_BLOCKS, born, key=lambda block: block.size)
        listed = sorted(largest, key=lambda block: block.birth)
    sizes, modules, ops = _Once[int](), _Once[str](), _Once[str]()
    return {
        "of": len(born),
        "sizes": sizes.values,
        "modules": modules.values,
        "ops": ops.values,
        "size": [sizes.place(block.size) for block in listed],
        "birth": differences([block.birth for block in listed]),
        # 0 if the block outlives the last phase.
        "life": [_life(block, stop) for block in listed],
        "category": [categories.index(str(block.category)) for block in listed],
        "module": [modules.place(block.module) for block in listed],
        "op": [ops.place(block.op) for block in listed],
    }


def _life(block: Block, stop: int) -> int:
    return 0 if block.death is None or block.death >= stop else block.death - block.birth


_Value = TypeVar("_Value")


class _Once(Generic[_Value]):
    """Values in order of appearance, each once."""

    def __init__(self) -> None:
        self.values: list[_Value] = []
        self._places: dict[_Value, int] = {}

    def place(self, value: _Value) -> int:
        """The value's index; a new value is appended."""
        place = self._places.setdefault(value, len(self.values))
        if place == len(self.values):
            self.values.append(value)
        return place


def differences(numbers: Iterable[int]) -> list[int]:
    """Delta-encode numbers, so that most have few digits: the first, then the differences."""
    before, result = 0, []
    for number in numbers:
        result.append(number - before)
        before = number
    return result
