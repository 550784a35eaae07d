"""Which file a name asks for, by how it ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from oomph.errors import BadInput
from oomph.reporting.exports.memory_viz import memory_viz_pickle
from oomph.reporting.exports.plain import blocks_csv, timeline_json
from oomph.reporting.exports.trace_events import trace_events_json
from oomph.reporting.history import History
from oomph.reporting.writing import write_whole

Export = Callable[[History], bytes]

#: The longest ending that fits wins.
FORMATS: dict[str, Export] = {
    ".csv": blocks_csv,
    ".json": timeline_json,
    ".perfetto.json": trace_events_json,
    ".trace.json": trace_events_json,
    ".pickle": memory_viz_pickle,
}
FORMAT_WORDS = (
    ".csv lists every allocation, .json is the timeline, .perfetto.json or .trace.json is for"
    " ui.perfetto.dev, .pickle is for pytorch.org/memory_viz"
)


def export_of(path: str | Path) -> Export:
    """What writes a file of this name."""
    name = Path(path).name.lower()
    endings = [ending for ending in FORMATS if name.endswith(ending)]
    if not endings:
        raise BadInput(f"cannot tell what to export as {path}: {FORMAT_WORDS}")
    return FORMATS[max(endings, key=len)]


def save_export(history: History, path: str | Path) -> None:
    """Write a history in the format that the file's name asks for."""
    write_whole(path, export_of(path)(history))
