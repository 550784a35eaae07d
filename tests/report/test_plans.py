"""Plans in words: the first line, the changes as a diff, ledgers, and what is promised."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from oomph.plans.choices import Choices
from oomph.plans.fidelity import Fidelity
from oomph.plans.ledgers import Ledgers
from oomph.plans.plan import Change, MadeFor, Plan, Predicted
from oomph.report.plans import describe_no_plan, describe_plan, format_seconds
from oomph.report.report import Report, Table
from oomph.report.text import render_report
from oomph.search.attempt import NoPlan
from oomph.units import GIB, MIB


def change(technique: str, before: str, after: str, **values: Any) -> Change:
    given = {"saves": GIB, "costs": 0.0125, "fidelity": Fidelity.EXACT, **values}
    return Change(technique=technique, before=before, after=after, **given)


def made_for(gpu: str | None) -> MadeFor:
    return MadeFor(
        job="llama",
        parameters=10,
        weights="abc",
        batch=((16, 2048),),
        optimizer="AdamW",
        torch="2.13",
        gpu=gpu,
    )


PLAN = Plan(
    made_for=made_for("rtx-4090"),
    budget=24 * GIB,
    choices=Choices(blocks={"h.0": "keep", "h.1": "recompute"}),
    predicted=Predicted(
        peak=Ledgers(allocated=20 * GIB, reserved=21 * GIB, device=22 * GIB),
        high=23 * GIB,
        categories_at_peak={"optimizer state": 15 * GIB, "parameter": 5 * GIB, "input": MIB},
        seconds=0.575,
        unlimited_seconds=0.529,
        samples=16,
        tokens=32768,
    ),
    fidelity=Fidelity.ROUNDING,
    gap=0.004,
    changes=(
        change("recompute", "none", "9 of 16 blocks"),
        change("loss", "all logits", "4,096 rows at a time", saves=-100 * 1024, costs=-0.0302),
        change("optimizer in backward", "no", "yes", costs=0.0),
        change("weights", "own", "bf16 with fp32 masters", fidelity=Fidelity.ROUNDING),
    ),
    notes=("a note of the rehearsal",),
    planning_seconds=3.25,
)


def table(report: Report, title: str) -> Table:
    (found,) = (table for table in report.tables if table.title.startswith(title))
    return found


def notes(plan: Plan) -> tuple[str, ...]:
    return dict(describe_plan(plan).lists)["Notes"]


def test_the_first_line_says_budget_speed_and_techniques() -> None:
    assert str(PLAN).splitlines()[0] == (
        "fits: llama in 24.00 GiB on rtx-4090 at 56,988 tokens/s predicted, 92 % of unlimited:"
        " recompute 9 of 16 blocks, loss 4,096 rows at a time, optimizer in backward, weights bf16"
        " with fp32 masters"
    )


def test_a_plan_without_changes_leaves_the_job_as_it_is() -> None:
    plan = dataclasses.replace(PLAN, changes=())
    report = describe_plan(plan)
    assert report.headline.endswith(": as it is")
    assert not any(table.title.startswith("What changes") for table in report.tables)


def test_what_a_plan_switches_off_is_said_too() -> None:
    plan = dataclasses.replace(PLAN, changes=(change("fused optimizer", "yes", "no"),))
    assert describe_plan(plan).headline.endswith(": no fused optimizer")


def test_the_changes_are_a_diff_with_what_each_is_worth() -> None:
    rows = table(describe_plan(PLAN), "What changes").rows
    assert rows[0] == ("recompute", "none → 9 of 16 blocks", "1.00 GiB", "+12.5 ms", "exact")
    assert rows[1][2:4] == ("-100.0 KiB", "-30.2 ms")
    assert rows[2][3] == "0 µs"
    assert rows[3][4] == "rounding"


def test_the_three_ledgers_stay_apart() -> None:
    rows = table(describe_plan(PLAN), "Predicted peak, of 24.00 GiB").rows
    assert [row[:3] for row in rows] == [
        ("allocated", "20.00 GiB", "–"),
        ("reserved", "21.00 GiB", "–"),
        ("device", "22.00 GiB", "23.00 GiB"),
    ]


def test_categories_have_their_share_of_the_peak() -> None:
    rows = table(describe_plan(PLAN), "Alive at the predicted peak").rows
    assert rows == (
        ("optimizer state", "15.00 GiB", "75 %"),
        ("parameter", "5.00 GiB", "25 %"),
        ("input", "1.00 MiB", "<1 %"),
    )


def test_the_notes_say_fidelity_time_and_how_good_the_plan_is() -> None:
    said = notes(PLAN)
    assert said[0].startswith("fidelity is rounding: ")
    assert "a step is predicted to take 575.0 ms" in said
    assert any("at most 0.4 % faster" in note for note in said)
    assert said[-1] == "a note of the rehearsal"


def test_the_notes_say_what_is_taken_outside_the_gpu() -> None:
    def said(host: int, disk: int) -> list[str]:
        predicted = dataclasses.replace(PLAN.predicted, host=host, disk=disk)
        of_plan = notes(dataclasses.replace(PLAN, predicted=predicted))
        return [note for note in of_plan if note.startswith("outside the GPU")]

    assert said(0, 0) == []
    assert said(30 * GIB, 0) == ["outside the GPU it is predicted to take 30.00 GiB of host memory"]
    assert said(30 * GIB, 5 * GIB) == [
        "outside the GPU it is predicted to take 30.00 GiB of host memory and 5.00 GiB on the disk"
    ]


@pytest.mark.parametrize("fidelity", Fidelity)
def test_every_fidelity_has_its_words(fidelity) -> None:
    plan = dataclasses.replace(PLAN, fidelity=fidelity)
    assert notes(plan)[0].startswith(f"fidelity is {fidelity}: ")


def test_on_the_cpu_there_are_only_tensors_and_no_promise_of_time() -> None:
    plan = dataclasses.replace(PLAN, made_for=made_for(None), choices=Choices())
    report = describe_plan(plan)
    assert "24.00 GiB on the CPU at " in report.headline
    assert [row[0] for row in table(report, "Predicted peak").rows] == ["tensors"]
    assert any("no promise" in note for note in notes(plan))
    assert not any("faster" in note for note in notes(plan))


def test_below_the_first_line_everything_is_80_columns_wide() -> None:
    _, *rest = str(PLAN).splitlines()
    assert max(map(len, rest)) <= 80
    assert rest[-1] == "Predicted in 3.2 s; nothing was run."


def test_where_no_plan_fits_the_cards_that_would_do_are_named() -> None:
    answer = NoPlan(
        job="llama",
        gpu="rtx-4090",
        budget=24 * GIB,
        smallest_budget=40 * GIB,
        reason="no plan fits 24.00 GiB: the leanest needs 40.00 GiB (less of it)",
        seconds=1.0,
    )
    first, second, *_ = str(answer).splitlines()
    assert first == f"does not fit: llama on rtx-4090; {answer.reason}"
    assert second.startswith("The smallest GPUs that would hold it: ")
    assert "(44." in second
    on_the_cpu = dataclasses.replace(answer, gpu=None)
    assert describe_no_plan(on_the_cpu).advice == ()
    no_card_does = dataclasses.replace(answer, smallest_budget=10_000 * GIB)
    assert "GPUs" not in render_report(describe_no_plan(no_card_does))


@pytest.mark.parametrize(
    ("seconds", "words", "signed"),
    [
        (1234.5, "1,234.50 s", "+1,234.50 s"),
        (1.5, "1.50 s", "+1.50 s"),
        (0.0312, "31.2 ms", "+31.2 ms"),
        (-0.0312, "-31.2 ms", "-31.2 ms"),
        (1.5e-5, "15 µs", "+15 µs"),
        (1e-9, "0 µs", "0 µs"),
        (-1e-9, "0 µs", "0 µs"),
    ],
)
def test_seconds_are_short(seconds, words, signed) -> None:
    assert format_seconds(seconds) == words
    assert format_seconds(seconds, sign=True) == signed
