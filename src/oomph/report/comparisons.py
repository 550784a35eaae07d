"""Describe the comparison of two memory files, the largest changes first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from oomph.report.findings import MOST_ROWS, Findings
from oomph.report.report import Table
from oomph.units import format_bytes

if TYPE_CHECKING:
    from oomph.explaining.comparing import Comparison, Difference


def describe_comparison(comparison: Comparison) -> Findings:
    """The result as the headline, then all ledgers, and the categories, modules and lines that
    changed."""
    threshold = comparison.threshold
    verdict = ""
    if threshold is not None:
        word = "more" if comparison.regressed else "not more"
        verdict = f"{'regressed' if comparison.regressed else 'ok'}: {word} than {threshold.text}; "
    return Findings(
        headline=f"{verdict}{comparison.headline}",
        advice=(),
        tables=(
            _table("Peak by ledger", "ledger", comparison.ledgers, keep_same=True),
            _table("By category", "category", comparison.categories),
            _table("By module", "module", comparison.modules),
            _table("By line", "line", comparison.sites),
        ),
        lists=(
            (
                "Compared",
                (
                    f"before: {comparison.before.source}, {comparison.before.kind}",
                    f"after: {comparison.after.source}, {comparison.after.kind}",
                    *comparison.notes,
                ),
            ),
        ),
    )


def _table(
    title: str, what: str, differences: Sequence[Difference], *, keep_same: bool = False
) -> Table:
    shown = [one for one in differences if keep_same or one.change][:MOST_ROWS]
    return Table(
        title=title,
        header=(what, "before", "after", "change", ""),
        rows=tuple(
            (
                one.name,
                format_bytes(one.before),
                format_bytes(one.after),
                format_change(one.change),
                f"{100 * one.change / one.before:+.1f} %" if one.before else "new",
            )
            for one in shown
        ),
    )


def format_change(size: int) -> str:
    """Format a change in bytes with its sign."""
    return f"+{format_bytes(size)}" if size > 0 else format_bytes(size)
