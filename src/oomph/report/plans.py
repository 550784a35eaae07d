"""Describe a plan: the verdict, the changes as a diff, the predicted memory and time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from oomph.report.report import LEDGER_WORDS, VERDICT_WORDS, Report, Table, smallest_gpus
from oomph.units import format_bytes

if TYPE_CHECKING:
    from oomph.plans.plan import Plan
    from oomph.search.attempt import Attempt, NoPlan

_FIDELITY_WORDS = {
    "exact": "the numbers are the untouched job's, but for the order of sums",
    "rounding": "the numbers are the untouched job's, but for how they are rounded on the way",
    "lossy": "information is dropped: watch the loss",
}


def describe_attempt(attempt: Attempt) -> Report:
    """The report on a plan, or on why there is none."""
    from oomph.search.attempt import NoPlan

    return describe_no_plan(attempt) if isinstance(attempt, NoPlan) else describe_plan(attempt)


def describe_plan(plan: Plan) -> Report:
    """The full report on a plan."""
    tables = [_changes(plan), _ledgers(plan), _categories(plan)]
    return Report(
        verdict=VERDICT_WORDS[plan.verdict],
        headline=f"{plan.made_for.job} in {plan.summary}",
        advice=(),
        tables=tuple(table for table in tables if table.rows),
        lists=(("Notes", tuple(_notes(plan))),),
        seconds=plan.planning_seconds,
    )


def describe_no_plan(answer: NoPlan) -> Report:
    """The report that no plan fits, with the memory for which there would be one."""
    return Report(
        verdict=VERDICT_WORDS[answer.verdict],
        headline=f"{answer.job} on {answer.gpu or 'the CPU'}; {answer.reason}",
        advice=tuple(_larger_cards(answer)),
        tables=(),
        lists=(),
        seconds=answer.seconds,
    )


def _larger_cards(answer: NoPlan) -> Iterable[str]:
    if answer.gpu is None:
        return
    cards = smallest_gpus(answer.smallest_budget, answer.gpu)
    names = ", ".join(f"{gpu.name} ({format_bytes(gpu.memory)})" for gpu in cards)
    if names:
        yield f"The smallest GPUs that would hold it: {names}."


def _changes(plan: Plan) -> Table:
    return Table(
        title="What changes, and what each change is worth beside the others",
        header=("technique", "before → after", "memory saved", "time a step", "fidelity"),
        rows=tuple(
            (
                change.technique,
                f"{change.before} → {change.after}",
                format_bytes(change.saves),
                format_seconds(change.costs, sign=True),
                str(change.fidelity),
            )
            for change in plan.changes
        ),
        text=("before → after", "fidelity"),
    )


def _ledgers(plan: Plan) -> Table:
    peak = plan.predicted.peak
    if plan.made_for.gpu is None:
        words = "on the CPU, without what kernels take as scratch"
        rows = [("tensors", format_bytes(peak.allocated), "–", words)]
    else:
        at_most = {"device": format_bytes(plan.predicted.high)}
        rows = [
            (name, format_bytes(size), at_most.get(name, "–"), LEDGER_WORDS[name])
            for name, size in peak.as_dict().items()
        ]
    return Table(
        title=f"Predicted peak, of {format_bytes(plan.budget)}",
        header=("ledger", "peak", "at most", "what it counts"),
        rows=tuple(rows),
        text=("what it counts",),
    )


def _categories(plan: Plan) -> Table:
    sizes = plan.predicted.categories_at_peak
    total = sum(sizes.values())
    return Table(
        title="Alive at the predicted peak, by category",
        header=("category", "size", "share"),
        rows=tuple((name, format_bytes(size), _share(size, total)) for name, size in sizes.items()),
    )


def _notes(plan: Plan) -> Iterable[str]:
    yield f"fidelity is {plan.fidelity}: {_FIDELITY_WORDS[plan.fidelity]}"
    step = f"a step is predicted to take {format_seconds(plan.predicted.seconds)}"
    if plan.made_for.gpu is None:
        yield f"{step}: on the CPU that compares plans and is no promise"
    else:
        yield step
    if plan.predicted.host:
        yield f"outside the GPU it is predicted to take {_say_outside(plan)}"
    if plan.choices.blocks:
        gap = f"{100 * plan.gap:.1f} %"
        yield f"another choice for the blocks would be at most {gap} faster, by the same clock"
    yield from plan.notes


def _say_outside(plan: Plan) -> str:
    host, disk = format_bytes(plan.predicted.host), format_bytes(plan.predicted.disk)
    return f"{host} of host memory" + (f" and {disk} on the disk" if plan.predicted.disk else "")


def format_seconds(seconds: float, *, sign: bool = False) -> str:
    """Format a time with about three digits: `1.52 s`, `31.0 ms`, with a sign `+15 µs`."""
    plus = "+" if sign and round(seconds * 1e6) > 0 else ""
    size = abs(seconds)
    if size >= 1:
        return f"{plus}{seconds:,.2f} s"
    if size >= 1e-3:
        return f"{plus}{seconds * 1e3:.1f} ms"
    return f"{plus}{round(seconds * 1e6)} µs"


def _share(size: int, total: int) -> str:
    percent = 100 * size / total
    return "<1 %" if percent < 1 else f"{percent:.0f} %"
