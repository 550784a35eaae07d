"""Memory over time by category, downsampled without losing a peak."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oomph.rehearsal.timeline import Category
from oomph.report.history import History

Numbers = NDArray[np.int64]

#: From the bottom of the stacked chart to its top: the longest-lived category is lowest.
STACK = (
    Category.PARAMETER,
    Category.BUFFER,
    Category.OPTIMIZER,
    Category.GRADIENT,
    Category.INPUT,
    Category.ACTIVATION,
    Category.WORKSPACE,
    Category.TEMPORARY,
)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Bytes right after each of some events, one row of `sizes` for each category."""

    categories: tuple[str, ...]
    events: Numbers
    sizes: Numbers
    """Requested bytes, without the allocator's rounding."""
    allocated: Numbers
    reserved: Numbers

    def at(self, event: int) -> dict[str, int]:
        """The split by category right after an event."""
        here = int(np.searchsorted(self.events, event, side="right")) - 1
        if here < 0:
            return dict.fromkeys(self.categories, 0)
        return {name: int(row[here]) for name, row in zip(self.categories, self.sizes, strict=True)}

    def _only(self, places: Numbers) -> Samples:
        return Samples(
            categories=self.categories,
            events=self.events[places],
            sizes=self.sizes[:, places],
            allocated=self.allocated[places],
            reserved=self.reserved[places],
        )


def take_samples(history: History) -> Samples:
    """One sample for each event until the last phase ends."""
    names = {str(block.category) for block in history.timeline.blocks}
    known = [str(category) for category in STACK if category in names]
    categories = (*known, *sorted(names - set(known)))
    rows = {name: row for row, name in enumerate(categories)}
    seen = list(history.walk())
    changes = np.zeros((len(categories), len(seen)), np.int64)
    for place, one in enumerate(seen):
        size = one.block.size if one.is_birth else -one.block.size
        changes[rows[str(one.block.category)], place] = size
    return Samples(
        categories=categories,
        events=np.array([one.event for one in seen], np.int64),
        sizes=changes.cumsum(axis=1),
        allocated=np.array([one.allocated for one in seen], np.int64),
        reserved=np.array([one.reserved for one in seen], np.int64),
    )


def thin(samples: Samples, stretches: int, keep: Collection[int] = ()) -> Samples:
    """Keep at most a few samples for each of `stretches` time intervals.

    Each interval keeps its highest and lowest values of allocated and of reserved. The maximum of
    every category over all time and the events of `keep` are kept, too.
    """
    if len(samples.events) <= 4 * stretches:
        return samples
    kept = {0, len(samples.events) - 1, *(int(row.argmax()) for row in samples.sizes)}
    kept |= {int(np.searchsorted(samples.events, event, side="right")) - 1 for event in keep}
    kept |= extremes(samples.allocated, stretches) | extremes(samples.reserved, stretches)
    return samples._only(np.array(sorted(kept - {-1}), np.int64))


def extremes(values: Numbers, stretches: int) -> set[int]:
    """The indices of the highest and the lowest value in each of `stretches` intervals."""
    edges = np.linspace(0, len(values), min(stretches, len(values)) + 1).astype(np.int64)
    places = set()
    for start, stop in itertools.pairwise(edges):
        part = values[start:stop]
        places |= {int(start + part.argmax()), int(start + part.argmin())}
    return places
