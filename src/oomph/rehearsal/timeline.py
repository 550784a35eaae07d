"""The record of a rehearsal: every block of memory, when it was born, when it died, and why.

Time is counted in events: each allocation or free takes the next number. This keeps the exact order
in which the allocator would have seen them, independent of any clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

#: The bit that marks a death rather than a birth in an event encoded as a number.
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
    """One allocation. `size` is the requested size, before the allocator rounds it."""

    size: int
    birth: int
    death: int | None = None
    category: Category = Category.TEMPORARY
    module: str = ""
    op: str = ""
    phase: str = ""
    stream: int = 0
    #: Scratch memory whose size a library chooses by itself: the true size may differ.
    doubtful: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """A named stretch of the timeline: a phase, or a part of one such as `forward`."""

    name: str
    start: int
    stop: int


#: The name of the mark at the end of an optimizer step.
END_OF_STEP = "end of step"


@dataclass(frozen=True, slots=True)
class Mark:
    """A named moment of the timeline, with the predicted time at that moment."""

    name: str
    event: int
    seconds: float
    """Kernel seconds so far, as the clock predicts them."""
    launches: float
    sent: int = 0
    """Bytes whose copy to the host has begun so far."""
    brought: int = 0
    """Bytes whose copy from the host has begun so far."""


@dataclass(kw_only=True)
class Timeline:
    """All blocks in order of birth, and the spans of the phases they lived in."""

    blocks: list[Block] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    events: int = 0
    #: Events before which the allocator returns all cached, unused memory to the driver.
    emptied: list[int] = field(default_factory=list)
    #: Whether a CUDA graph was requested for a forward that reads its data, which the card refuses.
    refuses_capture: bool = False
    #: Host memory that techniques take for offloaded tensors.
    host_bytes: int = 0
    #: Disk space that techniques take.
    disk_bytes: int = 0
    #: Assumptions made where only real data could tell, as sentences (rule 7).
    notes: list[str] = field(default_factory=list)
    #: Why the rehearsal differs from what the job would do, as sentences: with one of these no job
    #: is certain to fit.
    warnings: list[str] = field(default_factory=list)

    def stream_of_events(self) -> Iterator[tuple[int, Block, bool]]:
        """Every (event, block, is_birth) in the order the allocator sees them."""
        # Each event is packed into one integer (event number, death bit, block index): integers
        # sort fast, and that many tuples would trigger the garbage collector.
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
