"""Describe the answers that need many plans: the largest job with a plan, the best card."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from oomph.report.plans import describe_attempt
from oomph.report.report import VERDICT_WORDS, Report, Table
from oomph.units import format_bytes

if TYPE_CHECKING:
    from oomph.search.best_cards import BestCards, CardPlan
    from oomph.search.largest_planned import PlannedLimit


def describe_planned_limit(limit: PlannedLimit) -> Report:
    """The answer and the next larger size, then the full report on the plan at the answer."""
    report = describe_attempt(limit.attempt)
    size = f"a {limit.what} of {limit.value:,}"
    how_far = f"up to {size}" if limit.verdict == "fits" else f"not even with {size}"
    if limit.verdict == "fits" and limit.what == "batch":
        how_far += " in one piece"
    return dataclasses.replace(
        report,
        headline=f"{how_far}, {report.headline}",
        advice=(*_beyond(limit), *report.advice),
        seconds=limit.seconds,
    )


def _beyond(limit: PlannedLimit) -> Iterable[str]:
    if limit.verdict != "fits":
        return
    if limit.next_attempt is None or limit.next_value is None:
        yield f"Memory is not what limits it: {limit.reason}."
        return
    from oomph.search.attempt import NoPlan

    larger, attempt = f"A {limit.what} of {limit.next_value:,}", limit.next_attempt
    if isinstance(attempt, NoPlan):
        needs = format_bytes(attempt.smallest_budget)
        if attempt.host_missing:
            needs = f"{format_bytes(attempt.host_missing)} more host memory"
        yield f"{larger} does not fit: it needs {needs}."
    else:
        size, rate = attempt.choices.micro_batch, attempt.predicted.rate
        yield (
            f"{larger} runs best in micro-batches of {size:,}, at {rate} predicted; split like"
            " that, larger ones need hardly more."
        )
    if limit.next_value - limit.value > (limit.step if limit.value >= limit.step else 1):
        yield "Sizes between the two were not tried: planning for each takes a while."


def describe_best_cards(answer: BestCards) -> Report:
    """The best card, then every card."""
    others = [card for card in answer.cards if card.plan is None]
    order = "cheapest" if answer.by_cost else "fastest"
    notes = [
        f"prices are {answer.prices_from}",
        "each card has a plan of its own; `--gpu NAME` shows it",
    ]
    if answer.left_out:
        notes.append(f"left out, because CUDA's rules are not theirs: {', '.join(answer.left_out)}")
    tables = [
        _fitting_table(f"Cards with a plan, {order} first", answer),
        Table(
            title="Cards without one",
            header=("card", "memory", "why"),
            rows=tuple((c.gpu.name, format_bytes(c.gpu.memory), c.why_not) for c in others),
            text=("why",),
        ),
    ]
    return Report(
        verdict=VERDICT_WORDS[answer.verdict],
        headline=_headline(answer),
        advice=(),
        tables=tuple(table for table in tables if table.rows),
        lists=(("Notes", tuple(notes)),),
        seconds=answer.seconds,
    )


def _headline(answer: BestCards) -> str:
    total = len(answer.cards)
    first = answer.cheapest if answer.by_cost else answer.fastest
    if first is None or first.plan is None:
        return f"{answer.job} on none of {total} cards, whatever the plan"
    kind = "cheapest" if answer.by_cost else "fastest"
    cost = f", {_dollars(first)} a million {answer.unit}" if first.dollars_per_million else ""
    return (
        f"{answer.job} on {len(answer.fitting)} of {total} cards; the {kind} is"
        f" {first.gpu.name}{cost}: {first.plan.summary}"
    )


def _fitting_table(title: str, answer: BestCards) -> Table:
    return Table(
        title=title,
        header=("card", "memory", "needs", f"{answer.unit}/s", "$/h", f"$/M {answer.unit}"),
        rows=tuple(_row(card) for card in answer.fitting),
    )


def _row(card: CardPlan) -> tuple[str, ...]:
    assert card.plan is not None
    return (
        card.gpu.name,
        format_bytes(card.gpu.memory),
        format_bytes(card.plan.predicted.peak.device),
        f"{card.items_per_second:,.0f}",
        f"{card.dollars_per_hour:.2f}" if card.dollars_per_hour is not None else "–",
        _dollars(card),
    )


def _dollars(card: CardPlan) -> str:
    cost = card.dollars_per_million
    return f"${cost:,.4f}" if cost is not None else "–"
