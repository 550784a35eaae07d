"""Every allocation as CSV, and the whole timeline as JSON."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oomph.errors import BadInput
from oomph.files.plain_json import BadJson, parse_json
from oomph.files.schema import Count, Mismatch, Seconds, read_as
from oomph.quoting import brief
from oomph.rehearsal.timeline import Block, Category, Mark, Span, Timeline
from oomph.report.history import History

KIND = "oomph timeline"
SCHEMA_VERSION = 1
_MOST_VALUES = 100_000_000
_LARGEST = 1 << 60
_COLUMNS = ("birth", "death", "size", "category", "module", "op", "phase", "stream", "doubtful")


def blocks_csv(history: History) -> bytes:
    """One row for each allocation, in order of birth; no death if it outlives the rehearsal."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    writer.writerows(map(_row, history.timeline.blocks))
    return text.getvalue().encode()


def timeline_json(history: History) -> bytes:
    """Blocks, spans, marks and notes; `timeline_from_json` reads it back."""
    timeline = history.timeline
    values = {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        "events": timeline.events,
        "allocator": history.settings.as_text() if history.settings is not None else None,
        "overhead": history.overhead,
        "spans": [[span.name, span.start, span.stop] for span in timeline.spans],
        "marks": [[m.name, m.event, m.seconds, m.launches] for m in timeline.marks],
        "emptied": timeline.emptied,
        "notes": timeline.notes,
        "columns": _COLUMNS,  # for those who read it without oomph
        "blocks": [_row(block) for block in timeline.blocks],
    }
    return json.dumps(values, separators=(",", ":")).encode()


def timeline_from_json(text: bytes | str) -> Timeline:
    """The timeline that `timeline_json` wrote."""
    try:
        values = parse_json(text, most_values=_MOST_VALUES)
        if not isinstance(values, dict) or values.get("kind") != KIND:
            raise BadInput("this is no timeline: `oomph estimate --export FILE.json` writes one")
        if values.get("schema_version") != SCHEMA_VERSION:
            raise BadInput(
                f"the timeline has schema {brief(values.get('schema_version'))}, and this oomph"
                f" reads {SCHEMA_VERSION}; make it again"
            )
        blocks = _blocks(values.get("blocks"))
        stored = read_as(_Stored, values, open_ended=True)
    except (BadJson, Mismatch) as error:
        raise BadInput(f"this is no timeline, or only part of one: {error}") from None
    return Timeline(
        blocks=blocks,
        spans=[Span(*span) for span in stored.spans],
        marks=[Mark(*mark) for mark in stored.marks],
        emptied=list(stored.emptied),
        events=stored.events,
        notes=list(stored.notes),
    )


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """The contents of a file besides its blocks."""

    events: Count
    spans: tuple[tuple[str, Count, Count], ...]
    marks: tuple[tuple[str, Count, Seconds, Seconds], ...]
    emptied: tuple[Count, ...]
    notes: tuple[str, ...]


def _blocks(rows: Any) -> list[Block]:
    """Read the blocks; there may be millions, so they are checked column by column."""
    if not isinstance(rows, list):
        raise Mismatch("lacks its list of blocks")
    for at, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(_COLUMNS):
            raise Mismatch(f"has no block of {len(_COLUMNS)} parts as blocks[{at}]")
    columns = dict(zip(_COLUMNS, zip(*rows, strict=True), strict=True)) if rows else {}
    for name, column in columns.items():
        if odd := [one for one in column if not _BELONGS[name](one)]:
            raise Mismatch(f"has a block whose {name} cannot be {brief(odd[0])}")
    births, deaths = columns.get("birth", ()), columns.get("death", ())
    if any(later <= earlier for earlier, later in itertools.pairwise(births)):
        raise Mismatch("has blocks that are not in order of birth")
    if any(
        death is not None and death <= birth for birth, death in zip(births, deaths, strict=True)
    ):
        raise Mismatch("has a block that dies before it is born")
    return [_block(dict(zip(_COLUMNS, row, strict=True))) for row in rows]


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


#: Checks whether a value is valid for its column.
_BELONGS: dict[str, Callable[[Any], bool]] = {
    "birth": _is_count,
    "death": lambda value: value is None or _is_count(value),
    "size": _is_count,
    "category": lambda value: isinstance(value, str) and value in set(Category),
    "module": lambda value: isinstance(value, str),
    "op": lambda value: isinstance(value, str),
    "phase": lambda value: isinstance(value, str),
    "stream": _is_count,
    "doubtful": lambda value: isinstance(value, bool),
}


def _row(block: Block) -> list[Any]:
    return [str(v) if v is block.category else v for v in (getattr(block, c) for c in _COLUMNS)]


def _block(values: dict[str, Any]) -> Block:
    return Block(**{**values, "category": Category(values["category"])})
