"""The record of a rehearsal: every block of memory, when it was born, when it died, and why.

Time is counted in events: each allocation or free takes the next number, so the order in which the
allocator would have seen them is kept exactly, and nothing depends on a clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

#: The bit that tells a death from a birth where an event is written as a number.
_DEATH = 1 << 32


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


#: Where an optimizer step is over.
END_OF_STEP = "end of step"


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of the timeline that somebody wants to find again, and the time it was then."""

    name: str
    event: int
    seconds: float
    """Of kernels, as the clock predicts them."""
    launches: float
    sent: int = 0
    """Bytes that have begun to leave for the host so far."""
    brought: int = 0
    """Bytes that have begun to come from there."""


@dataclass(kw_only=True)
class Timeline:
    """All blocks in order of birth, and the spans of the phases they lived in."""

    blocks: list[Block] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    events: int = 0
    #: Events before which everything that is cached and unused is given back to the driver.
    emptied: list[int] = field(default_factory=list)
    #: Whether a CUDA graph was wanted of a forward that reads its data: the card refuses that.
    refuses_capture: bool = False
    #: Host memory that techniques take for what leaves the GPU.
    host_bytes: int = 0
    #: Room on the disk that they take.
    disk_bytes: int = 0
    #: Assumptions made where only real data could tell, in words (rule 7).
    notes: list[str] = field(default_factory=list)

    def stream_of_events(self) -> Iterator[tuple[int, Block, bool]]:
        """Every (event, block, is_birth) in the order the allocator sees them."""
        # As whole numbers (the event, whether it is a death, which block): they sort fast, and so
        # many tuples would set the garbage collector going.
        marks = [block.birth << 33 | at for at, block in enumerate(self.blocks)]
        marks += [
            block.death << 33 | _DEATH | at
            for at, block in enumerate(self.blocks)
            if block.death is not None
        ]
        marks.sort()
        for mark in marks:
            yield mark >> 33, self.blocks[mark & (_DEATH - 1)], not mark & _DEATH

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
