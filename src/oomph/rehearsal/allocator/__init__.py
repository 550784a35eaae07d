"""Replays the CUDA caching allocator's rules, with no GPU."""

from oomph.rehearsal.allocator.replay import (
    NULL,
    Allocator,
    AllocatorStats,
    OutOfMemory,
    Segment,
    SegmentBlock,
    TraceEvent,
    replay_trace,
)
from oomph.rehearsal.allocator.settings import AllocatorSettings

__all__ = [
    "NULL",
    "Allocator",
    "AllocatorSettings",
    "AllocatorStats",
    "OutOfMemory",
    "Segment",
    "SegmentBlock",
    "TraceEvent",
    "replay_trace",
]
