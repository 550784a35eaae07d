"""The report of a program that ran out of memory: plain JSON in a file private to its owner."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomph.errors import BadInput
from oomph.explaining.causes import Cause, Evidence
from oomph.explaining.remedies import Remedy
from oomph.files.reading import check_name
from oomph.units import format_bytes

SCHEMA_VERSION = 1
KIND = "oomph watch"


@dataclass(frozen=True, kw_only=True)
class OomReport:
    """Why memory ran out, what was alive, and what would have helped. All sizes are in bytes."""

    device: str
    gpu: str | None
    torch: str
    program: str
    """The command line."""
    causes: tuple[Cause, ...]
    """The largest first; the last is that it does not fit as it is."""
    remedies: tuple[Remedy, ...]
    evidence: Evidence

    @property
    def cause(self) -> Cause:
        """The answer."""
        return self.causes[0]

    @property
    def verdict(self) -> str:
        """The verdict that determines the command line's exit code."""
        return "does_not_fit"

    @property
    def headline(self) -> str:
        """The answer in one line."""
        place = f" ({self.evidence.failure.place})" if self.evidence.failure.place else ""
        return f"out of memory in {self.evidence.failure.phase}{place}: {self.cause.sentence}"

    @property
    def alive(self) -> str:
        """What was alive, in one line: the largest categories and modules."""
        alive = self.evidence.alive
        kinds, modules = (
            ", ".join(f"{name} {format_bytes(size)}" for name, size in list(sizes.items())[:4])
            for sizes in (alive.categories, alive.modules)
        )
        return f"alive were {kinds or 'no tensors'}" + (f"; by module {modules}" if modules else "")

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON; these keys stay."""
        seen = self.evidence
        return {
            "kind": KIND,
            "schema_version": SCHEMA_VERSION,
            "verdict": self.verdict,
            "headline": self.headline,
            "device": self.device,
            "gpu": self.gpu,
            "torch": self.torch,
            "program": self.program,
            "cause": str(self.cause.kind),
            "causes": [cause.as_dict() for cause in self.causes],
            "remedies": [remedy.as_dict() for remedy in self.remedies],
            "asked": seen.asked,
            "memory": seen.reading.as_dict(),
            "at": {**seen.failure.as_dict(), "steps": seen.steps},
            "inputs": {
                "now": list(seen.inputs.shape),
                "largest_before": list(seen.largest_before.shape),
            },
            "categories": seen.alive.categories,
            "modules": seen.alive.modules,
            "held": [held.as_dict() for held in seen.alive.held],
            "history": [[note.step, note.allocated, note.peak] for note in seen.notes],
            "eval_history": [[note.step, note.allocated, note.peak] for note in seen.eval_notes],
        }


def check_report_path(path: str | Path) -> Path:
    """Check now, rather than when memory runs out, that the report can be written."""
    target = Path(path)
    try:
        check_name(target)
    except OSError as error:
        raise BadInput(f"cannot write the report to {str(path)!r}: {error.strerror}") from None
    if target.is_dir():
        raise BadInput(f"{target} is a folder; name the file for the report")
    if not target.parent.is_dir():
        raise BadInput(f"cannot write the report: there is no folder {target.parent}")
    if not os.access(target.parent, os.W_OK):
        raise BadInput(f"cannot write the report: {target.parent} is read-only")
    return target


def write_report(report: OomReport, path: Path | None) -> Path:
    """Write the report to the given path, or to a new temporary file."""
    text = json.dumps(report.as_dict(), indent=2) + "\n"
    folder = path.parent if path is not None else None
    # Created readable only by its owner; an existing file is replaced atomically.
    handle, name = tempfile.mkstemp(prefix="oomph-", suffix=".json", dir=folder)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    written = Path(name)
    return written.replace(path) if path is not None else written
