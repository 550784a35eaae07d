"""Choose the export format by the file's suffix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from oomph.errors import BadInput
from oomph.files.writing import write_whole
from oomph.report.exports.memory_viz import memory_viz_pickle
from oomph.report.exports.plain import blocks_csv, timeline_json
from oomph.report.exports.trace_events import trace_events_json
from oomph.report.history import History

Export = Callable[[History], bytes]

#: The longest matching suffix wins.
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
    """The function that writes the format of this file name."""
    name = Path(path).name.lower()
    endings = [ending for ending in FORMATS if name.endswith(ending)]
    if not endings:
        raise BadInput(f"cannot tell what to export as {path}: {FORMAT_WORDS}")
    return FORMATS[max(endings, key=len)]


def save_export(history: History, path: str | Path) -> None:
    """Write a history in the format of the file's suffix."""
    write_whole(path, export_of(path)(history))
