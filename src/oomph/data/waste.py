"""How much of the device's computation is on padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Waste:
    """One epoch in tokens, over all ranks."""

    samples: int
    batches: int
    tokens: int
    """Tokens of the samples."""
    computed: int
    """Tokens including padding."""
    truncated: int
    """Samples that were cut."""
    tokens_cut: int
    skipped: int
    """Samples skipped because they are too long."""
    dropped: int
    """Samples left out of this epoch because the ranks could not share them evenly."""

    @property
    def padding(self) -> float:
        """The share of computed tokens that is padding."""
        return 1 - self.tokens / self.computed

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON; these keys stay."""
        return {"schema_version": SCHEMA_VERSION, **vars(self), "padding": self.padding}

    def __str__(self) -> str:
        words = (
            f"{self.samples:,} samples in {self.batches:,} batches: {self.tokens:,} tokens, and"
            f" {self.padding:.1%} of {self.computed:,} computed are padding"
        )
        if self.truncated:
            words += f"; {self.truncated:,} samples were cut by {self.tokens_cut:,} tokens"
        if self.skipped:
            words += f"; {self.skipped:,} samples were too long and left out"
        if self.dropped:
            words += f"; {self.dropped:,} samples are left out of this epoch"
        return words
