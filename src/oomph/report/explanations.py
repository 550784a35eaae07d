"""Describe what a file about memory says, as sentences and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oomph.report.findings import MOST_ROWS, Findings
from oomph.report.report import LEDGER_WORDS, Table
from oomph.units import format_bytes

if TYPE_CHECKING:
    from oomph.explaining.explanation import Explanation

_SITE_WORDS = {
    "watch report": "Held by your program, by the line that fills it",
    "snapshot": "By the line that asked for it",
    "trace": "The largest requests, by the op that made them",
}


def describe_explanation(explanation: Explanation) -> Findings:
    """The headline, then tables by ledger, category, module and line."""
    said = "Predicted peak" if explanation.predicted else "Measured"
    # Only the details of a watch report have these keys.
    watched = explanation.details if explanation.kind == "watch report" else {}
    ledgers = Table(
        title=said,
        header=("ledger", "size", "what it counts"),
        rows=tuple(
            (name, format_bytes(size), LEDGER_WORDS[name])
            for name, size in explanation.ledgers.items()
        ),
        text=("what it counts",),
    )
    return Findings(
        headline=explanation.headline,
        advice=explanation.advice,
        tables=(
            ledgers,
            _sizes("By category", "category", explanation.categories),
            _sizes("By module", "module", explanation.modules),
            _sizes(_SITE_WORDS.get(explanation.kind, ""), "line", explanation.sites),
            _history(watched.get("history")),
        ),
        lists=(("Other causes that would each be enough", _other_causes(watched)),),
    )


def _sizes(title: str, what: str, sizes: dict[str, int]) -> Table:
    total = sum(sizes.values())
    rows = [
        (name, format_bytes(size), f"{100 * size / total:.0f} %" if total else "–")
        for name, size in list(sizes.items())[:MOST_ROWS]
    ]
    rest = list(sizes.values())[MOST_ROWS:]
    if rest:
        rows.append((f"({len(rest)} more)", format_bytes(sum(rest)), ""))
    return Table(title=title, header=(what, "size", "share"), rows=tuple(rows))


def _history(notes: Any) -> Table:
    """Memory after some steps, evenly spaced and including the last."""
    notes = notes if isinstance(notes, list) else []
    every = max(len(notes) // MOST_ROWS, 1)
    shown = notes[::-1][::every][::-1]
    return Table(
        title="Allocated after each step",
        header=("step", "allocated", "highest so far"),
        rows=tuple(
            (f"{step:,}", format_bytes(allocated), format_bytes(peak))
            for step, allocated, peak in shown
        ),
    )


def _other_causes(details: dict[str, Any]) -> tuple[str, ...]:
    return tuple(cause["sentence"] for cause in details.get("causes", ())[1:-1])
