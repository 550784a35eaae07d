"""What a page shows, whatever it comes from: an estimate, a plan, a script, a run, a snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from oomph.reporting.history import History
from oomph.reporting.report import Report, Table

if TYPE_CHECKING:
    from oomph.planning.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number that people look for first."""

    name: str
    text: str
    value: float
    key: str
    """Where it is in the page's facts: `peak.device`."""
    words: str = ""
    """What it counts, or the interval it lies in."""


@dataclass(frozen=True, kw_only=True)
class Gauge:
    """An amount beside what there is of it."""

    value: int
    low: int
    high: int
    budget: int


@dataclass(frozen=True, kw_only=True)
class Line:
    """Bytes over the same events as the history's, drawn over it; one point alone is a level."""

    name: str
    points: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Page:
    """Everything on a page. What is not given has no section."""

    title: str
    report: Report
    """Its verdict comes first, its tables and lists last."""
    facts: Mapping[str, Any]
    """The same as plain JSON, kept in the page for programs that read it."""
    closing: str
    """How all this was found."""
    figures: tuple[Figure, ...] = ()
    gauge: Gauge | None = None
    budget: int | None = None
    history: History | None = None
    peak: int | None = None
    """The event of the peak, where it is not that of the most allocated."""
    found: Literal["predicted", "measured"] = "predicted"
    """How the history was."""
    lines: tuple[Line, ...] = ()
    plan: Plan | None = None
    comparison: Table | None = None
    """Predicted beside measured."""
