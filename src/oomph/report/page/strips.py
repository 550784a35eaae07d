"""Time spans of the phases, of the parts of a step, and of the model's repeated blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from oomph.rehearsal.recorder import FORWARD
from oomph.rehearsal.timeline import Block, Category, Span, Timeline

#: With more pieces, a strip is illegible at any practical zoom.
MOST_PIECES = 4000
_OPTIMIZER_OPS = ("aten._foreach_", "aten._fused_ada", "aten._fused_sgd")
#: These are filed under the module that owns them, whenever they were made.
_FILED = (Category.PARAMETER, Category.BUFFER, Category.OPTIMIZER)


def phases_of(timeline: Timeline) -> list[Span]:
    """The phases that took any time, in order."""
    return sorted((s for s in timeline.spans if s.stop > s.start), key=lambda span: span.start)


def parts_of(timeline: Timeline) -> list[Span]:
    """Forward, backward and optimizer of each micro-batch and step, recognised by their ops."""
    starts = [mark.event for mark in timeline.marks if mark.name == FORWARD]
    ends = {span.stop for span in timeline.spans}
    parts: list[Span] = []
    for number, start in enumerate(starts):
        following = starts[number + 1] if number + 1 < len(starts) else timeline.events
        stop = min((end for end in ends if start < end <= following), default=following)
        parts += _parts_between(timeline, start, stop)
    return [part for part in parts if part.stop > part.start]


def _parts_between(timeline: Timeline, start: int, stop: int) -> Iterator[Span]:
    name, since = "forward", start
    for block in _born_between(timeline, start, stop):
        if name == "forward" and "_backward" in block.op:
            following = "backward"
        elif name != "optimizer" and block.op.startswith(_OPTIMIZER_OPS):
            following = "optimizer"
        else:
            continue
        yield Span(name, since, block.birth)
        name, since = following, block.birth
    yield Span(name, since, stop)


def _born_between(timeline: Timeline, start: int, stop: int) -> Sequence[Block]:
    first, end = (bisect_left(timeline.blocks, at, key=_birth) for at in (start, stop))
    return timeline.blocks[first:end]


def _birth(block: Block) -> int:
    return block.birth


def model_blocks_of(timeline: Timeline) -> list[Span]:
    """When each repeated block (`model.layers.3`) ran, by the memory that was allocated in it."""
    pieces: list[Span] = []
    now, since, last = ("", ""), 0, 0
    for block in timeline.blocks:
        if not block.module or block.category in _FILED:
            continue
        if (path := repeated_block(block.module), block.phase) != now:
            pieces.append(Span(now[0], since, last + 1))
            now, since = (path, block.phase), block.birth
        last = block.birth
    pieces = [span for span in (*pieces, Span(now[0], since, last + 1)) if span.name]
    # Keep only the longest; the others would be too thin to see.
    longest = sorted(pieces, key=lambda span: span.start - span.stop)[:MOST_PIECES]
    return sorted(longest, key=lambda span: span.start)


def repeated_block(module: str) -> str:
    """`model.layers.3` for `model.layers.3.mlp.up_proj`; empty outside of repeated blocks."""
    parts = module.split(".")
    for length, part in enumerate(parts, start=1):
        if part.isdigit():
            return ".".join(parts[:length])
    return ""
