"""Trace events for Perfetto and chrome://tracing: memory counters and slices of work.

The time is the event's number in microseconds, because a rehearsal gives the order of events but
not their duration.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from oomph.rehearsal.timeline import Span
from oomph.report.history import History
from oomph.report.page.samples import STACK
from oomph.report.page.strips import model_blocks_of, parts_of, phases_of

_PROCESS = 1
_THREADS = {"phases": 1, "parts of a step": 2, "blocks of the model": 3}


def trace_events_json(history: History) -> bytes:
    """The history as a JSON object of trace events."""
    timeline = history.timeline
    slices = zip(
        _THREADS.values(),
        (phases_of(timeline), parts_of(timeline), model_blocks_of(timeline)),
        strict=True,
    )
    events = [
        _named("process_name", "memory, one microsecond an event"),
        *(_named("thread_name", name, thread) for name, thread in _THREADS.items()),
        *(event for thread, spans in slices for event in _slices(thread, spans)),
        *_counters(history),
    ]
    values = {"displayTimeUnit": "ms", "traceEvents": events}
    return json.dumps(values, separators=(",", ":")).encode()


def _named(what: str, name: str, thread: int = 0) -> dict[str, Any]:
    return {"ph": "M", "pid": _PROCESS, "tid": thread, "name": what, "args": {"name": name}}


def _slices(thread: int, spans: Iterable[Span]) -> Iterator[dict[str, Any]]:
    for span in spans:
        where = {"ph": "X", "pid": _PROCESS, "tid": thread}
        yield {**where, "name": span.name, "ts": span.start, "dur": span.stop - span.start}


def _counters(history: History) -> Iterator[dict[str, Any]]:
    """A counter for each category and ledger, written only when it changes."""
    sizes = {str(block.category): 0 for block in history.timeline.blocks}
    before: dict[str, int] = {}
    order = [*(name for name in map(str, STACK) if name in sizes)]
    order += [name for name in sizes if name not in order]
    for one in history.walk():
        sizes[str(one.block.category)] += one.block.size if one.is_birth else -one.block.size
        now = {name: sizes[name] for name in order} | {"allocated": one.allocated}
        if history.settings is not None:
            now |= {"reserved": one.reserved, "device": one.reserved + history.overhead}
        for name, size in now.items():
            if before.get(name) != size:
                yield {
                    "ph": "C",
                    "pid": _PROCESS,
                    "ts": one.event,
                    "name": name,
                    "args": {"bytes": size},
                }
        before = now
