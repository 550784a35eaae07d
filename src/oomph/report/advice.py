"""Describe advice on an architecture, as sentences and a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oomph.report.comparisons import format_change
from oomph.report.findings import Findings
from oomph.report.report import Table
from oomph.units import format_bytes

if TYPE_CHECKING:
    from oomph.advising.advice import Advice
    from oomph.advising.suggestions import Suggestion

_ALTERS = {
    "nothing": "the numbers stay",
    "training": "trains differently",
    "model": "another model",
}


def describe_advice(advice: Advice) -> Findings:
    """The largest saving as the headline, then every suggestion with its numbers and its text."""
    return Findings(
        headline=_headline(advice),
        advice=(),
        tables=(
            Table(
                title="What would change that, predicted; nothing was changed",
                header=("topic", "memory", "parameters", "FLOPs a step", "by", "what it alters"),
                rows=tuple(_row(one) for one in advice.suggestions),
                text=("by", "what it alters"),
            ),
        ),
        lists=(
            (
                "In words",
                tuple(f"{one.topic}: {one.finding}; {one.change}" for one in advice.suggestions),
            ),
        ),
    )


def _headline(advice: Advice) -> str:
    place = advice.gpu or "the CPU"
    now = (
        f"{advice.job} has {advice.parameters:,} parameters; a step takes"
        f" {format_bytes(advice.peak)} on {place} and {format_flops(advice.flops)} (predicted)"
    )
    best = next((one for one in advice.suggestions if one.saves > 0), None)
    if best is None:
        return f"{now}; no change that was looked at would take less"
    return f"{now}; {best.topic}: a change would save {format_bytes(best.saves)} ({best.change})"


def _row(one: Suggestion) -> tuple[str, ...]:
    return (
        one.topic,
        format_change(-one.saves),
        f"{-one.parameters:+,}" if one.parameters else "–",
        format_flops(-one.flops, sign=True) if one.flops else "–",
        one.how,
        _ALTERS[one.alters],
    )


def format_flops(flops: float, *, sign: bool = False) -> str:
    """Format FLOPs with three digits and a prefix: `12.3 TFLOP`."""
    plus = "+" if sign and flops > 0 else ""
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if abs(flops) >= scale:
            return f"{plus}{flops / scale:.3g} {prefix}FLOP"
    return f"{plus}{flops:.0f} FLOP"
