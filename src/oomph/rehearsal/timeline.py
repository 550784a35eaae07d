"""The record of a rehearsal: every block of memory, when it was born, when it died, and why.

Time is counted in events: each allocation or free takes the next number, so the order in which the
allocator would have seen them is kept exactly, and nothing depends on a clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum


class Category(StrEnum):
    """What a block of memory is for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer state"
    INPUT = "input"
    ACTIVATION = "activation"
    TEMPORARY = "temporary"
    WORKSPACE = "workspace"


@dataclass(slots=True, kw_only=True)
class Block:
    """One allocation. `size` is what was asked for, before the allocator rounds it."""

    size: int
    birth: int
    death: int | None = None
    category: Category = Category.TEMPORARY
    module: str = ""
    op: str = ""
    phase: str = ""
    stream: int = 0
    #: Scratch of a library that chooses its size by itself: the true size may differ.
    doubtful: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the timeline with a name: a phase, or a part of one such as `forward`."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of the timeline that somebody wants to find again, and the time it was then."""

    name: str
    event: int
    seconds: float
    """Of kernels, as the clock predicts them."""
    launches: int


@dataclass(kw_only=True)
class Timeline:
    """All blocks in order of birth, and the spans of the phases they lived in."""

    blocks: list[Block] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    events: int = 0
    #: Events before which everything that is cached and unused is given back to the driver.
    emptied: list[int] = field(default_factory=list)
    #: Host memory that techniques take for what leaves the GPU.
    host_bytes: int = 0
    #: Assumptions made where only real data could tell, in words (rule 7).
    notes: list[str] = field(default_factory=list)

    def stream_of_events(self) -> Iterator[tuple[int, Block, bool]]:
        """Every (event, block, is_birth) in the order the allocator sees them."""
        marks = [(block.birth, block, True) for block in self.blocks]
        marks += [(block.death, block, False) for block in self.blocks if block.death is not None]
        marks.sort(key=lambda mark: mark[0])
        return iter(marks)

    def alive_at(self, event: int) -> list[Block]:
        """The blocks that exist right after `event`."""
        return [
            block
            for block in self.blocks
            if block.birth <= event and (block.death is None or block.death > event)
        ]

    def span_at(self, event: int) -> str:
        """The name of the phase that `event` falls into."""
        for span in self.spans:
            if span.start <= event < span.stop:
                return span.name
        return ""
