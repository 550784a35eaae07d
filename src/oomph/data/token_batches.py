"""Batches of about equally many tokens, from samples of any length.

Samples of similar length go together, so there is little padding. The number of samples depends on
their length, so a batch of the longest takes no more memory than was planned for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oomph.data.epochs import EpochBatches, Uneven
from oomph.data.lengths import Lengths, TooLong, check_lengths
from oomph.errors import BadInput
from oomph.jobs.job import check_count

#: Samples that are sorted by length together: more pad less, fewer mix better.
WINDOW = 8192


class TokenBatches(EpochBatches[int]):
    """A batch sampler for `DataLoader(batch_sampler=…)`: lists of samples, each once per epoch.

    A batch, padded to its longest sample, has at most `tokens` tokens. An epoch is shuffled, sorted
    by length within windows and cut into batches, and the batches are shuffled.
    """

    def __init__(
        self,
        lengths: Lengths,
        *,
        tokens: int,
        longest: int | None = None,
        multiple: int = 1,
        samples: int | None = None,
        too_long: TooLong = "error",
        window: int = WINDOW,
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        world: int = 1,
        uneven: Uneven = "error",
    ) -> None:
        """`longest` is the most tokens a sample may have, by default all of `tokens`.

        Samples are padded to a `multiple`, and a batch has at most `samples` samples. Truncation is
        up to the code that loads the samples: `pad_samples` does it.
        """
        self.tokens = check_count("the tokens of a batch", tokens)
        self.multiple = check_count("the multiple", multiple)
        self.longest = min(longest or self.tokens, self.tokens) // self.multiple * self.multiple
        self._most = check_count("the samples of a batch", samples) if samples else None
        self._window = check_count("the window", window)
        if not self.longest:
            raise BadInput(
                f"samples padded to a multiple of {self.multiple:,} do not go into"
                f" {longest or self.tokens:,} tokens"
            )
        kept = check_lengths(lengths, longest=self.longest, too_long=too_long)
        super().__init__(kept, seed=seed, shuffle=shuffle, rank=rank, world=world, uneven=uneven)
        self._padded = self._pad(kept.lengths)

    def worst_shapes(self) -> tuple[tuple[int, int], ...]:
        """Samples and padded length of the largest batches of any epoch, the longest first.

        Every batch is no longer than one of these and has no more tokens than it. If `tokens` is a
        multiple of the longest sample's padded length, there is only one.
        """
        lengths, counts = np.unique(self._padded, return_counts=True)
        shorter = np.cumsum(counts)  # samples of this length or less
        worst: list[tuple[int, int]] = []
        for length, there in zip(lengths[::-1].tolist(), shorter[::-1].tolist(), strict=True):
            rows = min(self.tokens // length, there, self._most or there)
            if not worst or rows * length > max(one * other for one, other in worst):
                worst.append((rows, length))
        return tuple(worst)

    def _make_batches(self, order: NDArray[np.int64]) -> list[list[int]]:
        batches: list[list[int]] = []
        for at in range(0, len(order), self._window):
            window = order[at : at + self._window]
            # Stable: samples of equal length stay shuffled.
            window = window[np.argsort(self._padded[window], kind="stable")]
            batches += self._cut(window)
        return batches

    def _cut(self, window: NDArray[np.int64]) -> list[list[int]]:
        """Samples from the longest down, as many per batch as fit."""
        batches: list[list[int]] = []
        room = 0
        indices, padded = self.samples.indices, self._padded
        for at in window[::-1].tolist():
            if not room:
                room = self.tokens // int(padded[at])
                room = min(room, self._most or room)
                batches.append([])
            batches[-1].append(int(indices[at]))
            room -= 1
        return batches

    def _pad(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return -(-lengths // self.multiple) * self.multiple

    def _samples_in(self, batch: list[int]) -> list[int]:
        return batch

    def _computed(self, lengths: list[int], batch: list[int]) -> int:
        return len(batch) * int(self._pad(np.array(max(lengths))))

    def _split(self, batch: list[int]) -> tuple[list[int], list[int]]:
        middle = len(batch) // 2
        return batch[:middle], batch[middle:]

    def _settings(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "multiple": self.multiple,
            "most": self._most,
            "window": self._window,
        }
