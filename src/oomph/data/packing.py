"""Packing: several samples concatenated in one row, so that little is padded.

All rows have one length, so one plan, one compiled block and one CUDA graph serve all of them.
`packed_rows.py` keeps the samples apart.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oomph.data.epochs import EpochBatches, Uneven
from oomph.data.lengths import Lengths, TooLong, check_lengths
from oomph.jobs.job import check_count

#: Samples that are packed together: more pack better, fewer mix better.
WINDOW = 4096

#: The samples of one row.
Row = tuple[int, ...]


class PackedBatches(EpochBatches[Row]):
    """A batch sampler over a `PackedDataset`: `rows` rows of `length` tokens, each sample once.

    Within a window of the shuffled epoch each sample, the longest first, goes to the row where it
    leaves the least room. The last batches of an epoch may have fewer rows.
    """

    def __init__(
        self,
        lengths: Lengths,
        *,
        length: int,
        rows: int,
        too_long: TooLong = "error",
        window: int = WINDOW,
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        world: int = 1,
        uneven: Uneven = "error",
    ) -> None:
        self.length = check_count("the length of a row", length)
        self.rows = check_count("the rows of a batch", rows)
        self._window = check_count("the window", window)
        kept = check_lengths(lengths, longest=self.length, too_long=too_long)
        super().__init__(kept, seed=seed, shuffle=shuffle, rank=rank, world=world, uneven=uneven)

    def worst_shapes(self) -> tuple[tuple[int, int], ...]:
        """Rows and length of the largest batch of any epoch."""
        return ((min(self.rows, len(self.samples.indices)), self.length),)

    def _make_batches(self, order: NDArray[np.int64]) -> list[list[Row]]:
        rows: list[Row] = []
        for at in range(0, len(order), self._window):
            window = order[at : at + self._window]
            packed = best_fit(self.samples.lengths[window].tolist(), self.length)
            rows += [tuple(self.samples.indices[window[list(row)]].tolist()) for row in packed]
        # The longest samples were packed first: mix the rows as their samples are mixed.
        place_of = dict(zip(self.samples.indices[order].tolist(), range(len(order)), strict=True))
        rows.sort(key=lambda row: place_of[row[0]])
        return [rows[at : at + self.rows] for at in range(0, len(rows), self.rows)]

    def _samples_in(self, batch: list[Row]) -> list[int]:
        return [index for row in batch for index in row]

    def _computed(self, lengths: list[int], batch: list[Row]) -> int:
        return self.length * len(batch)

    def _split(self, batch: list[Row]) -> tuple[list[Row], list[Row]]:
        if len(batch) > 1:
            middle = len(batch) // 2
            return batch[:middle], batch[middle:]
        (row,) = batch
        return [row[:1]], [row[1:]]

    def _settings(self) -> dict[str, Any]:
        return {"length": self.length, "rows": self.rows, "window": self._window}


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Best fit, longest first: rows of size `room` that hold all, as indices of `lengths`."""
    rows: list[list[int]] = []
    #: Remaining room and the row it is in, sorted by room.
    left: list[tuple[int, int]] = []
    # Stable: samples of equal length keep their order.
    for at in sorted(range(len(lengths)), key=lambda at: -lengths[at]):
        found = bisect.bisect_left(left, (lengths[at], -1))
        if found == len(left):
            rows.append([at])
            rest, row = room - lengths[at], len(rows) - 1
        else:
            before, row = left.pop(found)
            rows[row].append(at)
            rest = before - lengths[at]
        if rest:
            bisect.insort(left, (rest, row))
    return rows
