"""More room for a candidate: other ways to run its blocks, or fewer rows of its loss at a time."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from oomph.plans.choices import Choices
from oomph.search.candidates import Candidate
from oomph.search.planner import FRAGMENTED, SMALL_LOSS, Planner

PEAK = 1000
BASE = Choices(optimizer_on="host", head="head", loss_chunk=8192, blocks={"block": "keep"})


def profiles(rows: int | None) -> Any:
    """What was heard with so many rows: blocks are recomputed where there is less room."""
    choices = dataclasses.replace(BASE, loss_chunk=rows, head="head" if rows else "")
    recomputed = dataclasses.replace(choices, blocks={"block": "recompute"})
    return SimpleNamespace(choices=choices, choose=lambda _: recomputed, seconds=lambda _: 1.0)


def leaner(missing: int, fits: dict[int | None, int]) -> Any:
    """With rows of the loss that fit so much room at least."""
    variants = [profiles(rows) for rows in fits]
    planner: Any = Planner.__new__(Planner)
    planner._variants = {0: (variants[0], variants)}
    planner._within = lambda variant, room: (
        [SimpleNamespace(peak=room)] if room >= fits[variant.choices.loss_chunk] else []
    )
    candidate = Candidate(
        seconds=1.0,
        number=0,
        profiles=variants[0],
        solution=SimpleNamespace(peak=PEAK),  # type: ignore[arg-type]
        choices=variants[0].choices,
    )
    found = planner._leaner(candidate, missing)
    return None if found is None else (found.choices.loss_chunk, found.choices.blocks["block"])


def test_the_loss_stays_where_blocks_leave_the_room() -> None:
    assert leaner(100, {8192: 500, 4096: 400}) == (8192, "recompute")


def test_it_gets_smaller_where_they_do_not() -> None:
    assert leaner(300, {8192: 800, 4096: 750, 2048: 600}) == (2048, "recompute")


def test_room_without_any_to_spare_will_do() -> None:
    assert leaner(300, {8192: PEAK - 300}) == (8192, "recompute")


def test_a_little_may_be_gaps_that_a_small_loss_does_not_have() -> None:
    little = int(FRAGMENTED * PEAK)
    assert leaner(little, {8192: PEAK}) == (SMALL_LOSS, "keep")
    assert leaner(little + 1, {8192: PEAK}) is None


def test_without_rows_of_a_loss_there_is_nothing_else() -> None:
    assert leaner(10, {None: PEAK}) is None
