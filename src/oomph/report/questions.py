"""Describe the answers that need many estimates: the largest job that fits, the cards for a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from oomph.report.report import (
    VERDICT_WORDS,
    Report,
    Table,
    describe,
    describe_need,
    format_range,
)
from oomph.units import format_bytes

if TYPE_CHECKING:
    from oomph.search.cards import CardSurvey, CardVerdict
    from oomph.search.limits import Limit


def describe_limit(limit: Limit) -> Report:
    """The answer and the next larger size, then the full report on the estimate at the answer."""
    report = describe(limit.estimate)
    size = f"a {limit.what} of {limit.value:,}"
    how_far = {
        "fits": f"up to {size}",
        "inconclusive": f"even with {size}",
        "does_not_fit": f"not even with {size}",
    }[limit.verdict]
    return dataclasses.replace(
        report,
        headline=f"{how_far}, where {describe_need(limit.estimate)}",
        advice=(*_beyond(limit), *report.advice),
        seconds=limit.seconds,
    )


def _beyond(limit: Limit) -> Iterable[str]:
    if not limit.fits:
        return
    if limit.next_estimate is None:
        yield f"Memory is not what limits it: {limit.reason}."
        return
    verdict = VERDICT_WORDS[limit.next_estimate.verdict]
    words = f"is {verdict}" if verdict == "inconclusive" else verdict
    yield f"A {limit.what} of {limit.next_value:,} {words}: {describe_need(limit.next_estimate)}."
    if limit.value >= limit.step > 1:
        yield f"From {limit.step} on, only multiples of {limit.step} are tried."


def describe_cards(survey: CardSurvey) -> Report:
    """The smallest card that holds the job, then every card."""
    others = [card for card in survey.cards if card.verdict != "fits"]
    tables = [
        _cards_table("Cards that hold it, by memory", survey.fitting, "free"),
        _cards_table("Cards that do not, or may not", others, "verdict"),
    ]
    judged = [card.estimate for card in survey.cards if card.estimate is not None]
    lists = [
        (
            "Notes",
            (
                f"left out, because CUDA's rules are not theirs: {', '.join(survey.left_out)}",
                "cards of one compute capability share a rehearsal, that of the card with most"
                " multiprocessors",
                *_each_once(note for estimate in judged for note in estimate.notes),
            ),
        ),
        (
            "Why the intervals are this wide",
            _each_once(reason for estimate in judged for reason in estimate.interval_reasons),
        ),
    ]
    return Report(
        verdict=VERDICT_WORDS[survey.verdict],
        headline=_cards_headline(survey),
        advice=_cards_advice(survey),
        tables=tuple(table for table in tables if table.rows),
        lists=tuple(lists),
        seconds=survey.seconds,
    )


def _cards_headline(survey: CardSurvey) -> str:
    total = len(survey.cards)
    if survey.fitting:
        smallest = survey.fitting[0]
        assert smallest.estimate is not None
        name, need = smallest.gpu.name, describe_need(smallest.estimate)
        return f"on {len(survey.fitting)} of {total} cards; the smallest is {name}: {need}"
    perhaps = [card.gpu.name for card in survey.cards if card.verdict == "inconclusive"]
    surely = f" for sure, though it may on {', '.join(perhaps)}" if perhaps else ""
    largest = survey.cards[-1].estimate
    need = f": {describe_need(largest)}" if largest is not None else ""
    return f"on none of {total} cards{surely}{need}"


def _cards_advice(survey: CardSurvey) -> tuple[str, ...]:
    """The advice of the estimate for the card that the headline names."""
    named = survey.fitting[0] if survey.fitting else survey.cards[-1]
    return describe(named.estimate).advice if named.estimate is not None else ()


def _cards_table(title: str, cards: Sequence[CardVerdict], last: str) -> Table:
    return Table(
        title=title,
        header=("card", "memory", "needs", "interval", last),
        rows=tuple(_card_row(card, last) for card in cards),
        text=("verdict",),
    )


def _card_row(card: CardVerdict, last: str) -> tuple[str, ...]:
    memory = format_bytes(card.gpu.memory)
    if card.estimate is None:
        return card.gpu.name, memory, "–", "–", "no bf16"
    estimate, interval = card.estimate, card.estimate.interval["device"]
    assert estimate.budget is not None
    free = max(estimate.budget - estimate.peak.device, 0)
    words = format_bytes(free) if last == "free" else VERDICT_WORDS[estimate.verdict]
    return (
        card.gpu.name,
        memory,
        format_bytes(estimate.peak.device),
        format_range(interval.low, interval.high),
        words,
    )


def _each_once(sentences: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(sentences))
