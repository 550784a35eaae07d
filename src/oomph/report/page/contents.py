"""The contents of a page, for all sources: an estimate, a plan, a script, a run, a snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from oomph.report.history import History
from oomph.report.report import Report, Table

if TYPE_CHECKING:
    from oomph.plans.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A key figure, shown at the top."""

    name: str
    text: str
    value: float
    key: str
    """Its path in the page's facts: `peak.device`."""
    words: str = ""
    """The quantity that it counts, or its interval."""


@dataclass(frozen=True, kw_only=True)
class Gauge:
    """An amount of memory against a budget."""

    value: int
    low: int
    high: int
    budget: int


@dataclass(frozen=True, kw_only=True)
class Line:
    """Bytes by event, drawn over the history's chart; a single point is a horizontal line."""

    name: str
    points: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Page:
    """Everything on a page. A part that is not given has no section."""

    title: str
    report: Report
    """The page shows its verdict first, its tables and lists last."""
    facts: Mapping[str, Any]
    """The result as plain JSON, embedded in the page for programs that read it."""
    closing: str
    """A sentence on how the result was obtained."""
    figures: tuple[Figure, ...] = ()
    gauge: Gauge | None = None
    budget: int | None = None
    history: History | None = None
    peak: int | None = None
    """The event of the peak, if it is not the one with the most allocated bytes."""
    found: Literal["predicted", "measured"] = "predicted"
    """How the history was obtained."""
    lines: tuple[Line, ...] = ()
    plan: Plan | None = None
    comparison: Table | None = None
    """Predicted values beside measured ones."""
