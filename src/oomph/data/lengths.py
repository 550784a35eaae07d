"""Checks the lengths of samples, and refuses, cuts or skips those that are too long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from oomph.errors import BadInput

TooLong = Literal["error", "truncate", "skip"]
Lengths = Sequence[int] | NDArray[np.integer[Any]]

#: How many samples an error message names; it counts the rest.
NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The samples in use, and what was done with those that were too long."""

    indices: NDArray[np.int64]
    """Indices of the dataset, in its order."""
    lengths: NDArray[np.int64]
    """In tokens, after any truncation."""
    truncated: int
    tokens_cut: int
    """Tokens cut from the ends of truncated samples."""
    skipped: int

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return int(self.lengths.sum())


def check_lengths(lengths: Lengths, *, longest: int, too_long: TooLong) -> Samples:
    """The samples of up to `longest` tokens; `too_long` says what to do with longer ones."""
    if too_long not in get_args(TooLong):
        choices = ", ".join(get_args(TooLong))
        raise BadInput(f"too_long is one of {choices}, not {too_long!r}")
    given = np.asarray(lengths)
    if given.ndim != 1 or given.size == 0:
        raise BadInput("there are no samples: give the length of each, as a flat list")
    if not np.issubdtype(given.dtype, np.integer):
        raise BadInput(f"lengths are whole numbers of tokens, not {given.dtype}")
    known = given.astype(np.int64)
    if (known < 1).any():
        which = name_samples(np.flatnonzero(known < 1), known)
        raise BadInput(f"every sample needs at least one token: leave out {which}")
    indices = np.arange(known.size, dtype=np.int64)
    over = known > longest
    cut = int((known[over] - longest).sum())
    if too_long == "error" and over.any():
        raise BadInput(
            f"{name_samples(np.flatnonzero(over), known)}: at most {longest:,} tokens fit;"
            ' cut them with too_long="truncate", leave them out with too_long="skip", or make room'
            " for them"
        )
    if too_long == "skip":
        indices, known = indices[~over], known[~over]
        if not known.size:
            raise BadInput(
                f"every sample is longer than {longest:,} tokens: skipping those leaves none"
            )
    return Samples(
        indices=indices,
        lengths=np.minimum(known, longest),
        truncated=int(over.sum()) if too_long == "truncate" else 0,
        tokens_cut=cut if too_long == "truncate" else 0,
        skipped=int(over.sum()) if too_long == "skip" else 0,
    )


def name_samples(which: NDArray[np.int64], lengths: NDArray[np.int64]) -> str:
    """The first of these samples with their lengths, and how many more there are."""
    named = ", ".join(f"sample {at} of {lengths[at]:,} tokens" for at in which[:NAMED])
    more = len(which) - NAMED
    return f"{named} and {more:,} more" if more > 0 else named
