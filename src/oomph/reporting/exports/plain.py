"""Every allocation as CSV, and the whole timeline as JSON."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from oomph.errors import BadInput
from oomph.rehearsal.timeline import Block, Category, Mark, Span, Timeline
from oomph.reporting.history import History

KIND = "oomph timeline"
SCHEMA_VERSION = 1
_COLUMNS = ("birth", "death", "size", "category", "module", "op", "phase", "stream", "doubtful")


def blocks_csv(history: History) -> bytes:
    """One row for each allocation, in order of birth; no death where it outlives the rehearsal."""
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
        values = json.loads(text)
        if not isinstance(values, dict) or values.get("kind") != KIND:
            raise BadInput("this is no timeline: `oomph estimate --export FILE.json` writes one")
        if values["schema_version"] != SCHEMA_VERSION:
            raise BadInput(
                f"the timeline has schema {values['schema_version']!r}, and this oomph reads"
                f" {SCHEMA_VERSION}; make it again"
            )
        return Timeline(
            blocks=[_block(dict(zip(_COLUMNS, row, strict=True))) for row in values["blocks"]],
            spans=[Span(*span) for span in values["spans"]],
            marks=[Mark(*mark) for mark in values["marks"]],
            emptied=values["emptied"],
            events=values["events"],
            notes=values["notes"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"this is no timeline, or only part of one: {error}") from None


def _row(block: Block) -> list[Any]:
    return [str(v) if v is block.category else v for v in (getattr(block, c) for c in _COLUMNS)]


def _block(values: dict[str, Any]) -> Block:
    return Block(**{**values, "category": Category(values["category"])})
