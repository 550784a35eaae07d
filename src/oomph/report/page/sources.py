"""Make pages from oomph's results: an estimate, a plan, a training, the explanation of a file."""

from __future__ import annotations

import dataclasses
from pathlib import PurePath
from typing import TYPE_CHECKING

from oomph.report.explanations import describe_explanation
from oomph.report.history import history_of
from oomph.report.page.contents import Figure, Gauge, Line, Page
from oomph.report.plans import describe_attempt, format_seconds
from oomph.report.report import LEDGER_WORDS, Report, describe, format_range
from oomph.report.trained import describe_training
from oomph.search.attempt import Attempt, NoPlan
from oomph.units import format_bytes

if TYPE_CHECKING:
    from oomph.explaining.explanation import Explanation
    from oomph.plans.ledgers import Ledgers
    from oomph.plans.plan import Plan
    from oomph.rehearsal.estimation import Estimate
    from oomph.runs.training import Trained

_RAN_OUT = "out of memory"
#: Verdicts that a headline may begin with; other headlines have no verdict.
_VERDICTS = ("fits", "does not fit", "inconclusive", "trained", _RAN_OUT)
_KINDS = {"snapshot": "memory snapshot", "trace": "profiler trace"}


def page_of_estimate(estimate: Estimate) -> Page:
    """A page about an unchanged job or script."""
    device = estimate.interval["device"]
    report = describe(estimate)
    return Page(
        title=_title(estimate.job, estimate.gpu),
        report=report,
        facts=estimate.as_dict(),
        closing=f"Predicted in {report.seconds:.1f} s; nothing was run.",
        figures=_ledgers(
            estimate.peak,
            "peak",
            {name: format_range(one.low, one.high) for name, one in estimate.interval.items()},
            on_gpu=estimate.gpu is not None,
        ),
        gauge=_gauge(estimate.peak.device, device.low, device.high, estimate.budget),
        budget=estimate.budget,
        history=history_of(estimate),
        peak=estimate.peak_at.event,
    )


def page_of_attempt(attempt: Attempt) -> Page:
    """A page about a plan, or about why there is none."""
    return _page_of_no_plan(attempt) if isinstance(attempt, NoPlan) else page_of_plan(attempt)


def page_of_plan(plan: Plan) -> Page:
    """A page about a plan; a plan that was read from a file has no memory over time."""
    predicted, checked = plan.predicted, plan.checked
    return Page(
        title=_title(plan.made_for.job, plan.made_for.gpu),
        report=_without_changes(describe_attempt(plan)),
        facts=plan.as_dict(),
        closing=f"Planned in {plan.planning_seconds:.1f} s; nothing was run.",
        figures=(
            *_ledgers(
                predicted.peak,
                "predicted.peak",
                {"device": f"at most {format_bytes(predicted.high)}"},
                on_gpu=plan.made_for.gpu is not None,
            ),
            _step(predicted.seconds, "predicted.seconds", predicted.rate),
        ),
        gauge=_gauge(predicted.peak.device, predicted.peak.device, predicted.high, plan.budget),
        budget=plan.budget,
        history=history_of(checked) if checked is not None else None,
        peak=checked.peak_at.event if checked is not None else None,
        plan=plan,
    )


def _page_of_no_plan(answer: NoPlan) -> Page:
    report = describe_attempt(answer)
    return Page(
        title=_title(answer.job, answer.gpu),
        report=report,
        facts=answer.as_dict(),
        closing=f"Found out in {report.seconds:.1f} s; nothing was run.",
        figures=(
            Figure(
                name="smallest budget",
                text=format_bytes(answer.smallest_budget),
                value=answer.smallest_budget,
                key="smallest_budget",
                words="for which there would be a plan",
            ),
        ),
    )


def page_of_training(trained: Trained) -> Page:
    """A page about a training: the plan's prediction, overlaid with the measurements."""
    headline, table = describe_training(trained)
    planned = page_of_plan(trained.plan)
    plan_words = f"The plan: {trained.plan.summary}."
    report = dataclasses.replace(
        planned.report, verdict="trained", headline=headline, advice=(plan_words,)
    )
    memory = trained.memory
    measured = memory.as_dict() if memory is not None else {}
    return dataclasses.replace(
        planned,
        report=report,
        facts=trained.as_dict(),
        closing=f"Measured over {len(trained.steps)} steps; predicted before them.",
        figures=(
            *(_ledgers(memory, "measured.peak", {}, on_gpu=True) if memory is not None else ()),
            _step(trained.seconds, "measured.seconds", "measured, the median"),
        ),
        gauge=_gauge(memory.device, memory.device, memory.device, planned.budget)
        if memory is not None
        else None,
        lines=tuple(
            Line(name=f"measured peak, {name}", points=((0, measured[name]),))
            for name in ("allocated", "device")
            if name in measured
        ),
        comparison=table,
    )


def page_of_explanation(explanation: Explanation) -> Page:
    """A page about a file: why memory ran out, or the contents of a snapshot, trace or report."""
    findings = describe_explanation(explanation)
    verdict, headline = _split_headline(explanation)
    of = _KINDS.get(explanation.kind, explanation.kind)
    return Page(
        title=PurePath(explanation.source).name,
        report=Report(
            verdict=verdict,
            headline=headline,
            advice=findings.advice,
            tables=tuple(table for table in findings.tables if table.rows),
            lists=tuple(one for one in findings.lists if one[1]),
            seconds=0.0,
        ),
        facts=explanation.as_dict(),
        closing=f"Source: {of}; nothing in it was run.",
        figures=(*_request(explanation), *_explained_ledgers(explanation)),
        gauge=_overrun(explanation),
        found="predicted" if explanation.predicted else "measured",
    )


def _split_headline(explanation: Explanation) -> tuple[str, str]:
    """The verdict and the rest of the headline; without a verdict, the kind of file."""
    headline = explanation.headline
    for verdict in _VERDICTS:
        if headline.startswith((f"{verdict}: ", f"{verdict} in ")):
            return verdict, headline.removeprefix(verdict).removeprefix(": ").strip()
    return _KINDS.get(explanation.kind, explanation.kind), headline


def _request(explanation: Explanation) -> tuple[Figure, ...]:
    """The request that failed, if the file has one."""
    if explanation.kind != "watch report" or not explanation.details["asked"]:
        return ()
    asked = int(explanation.details["asked"])
    return (
        Figure(
            name="asked for",
            text=format_bytes(asked),
            value=asked,
            key="details.asked",
            words="the request that failed",
        ),
    )


def _explained_ledgers(explanation: Explanation) -> tuple[Figure, ...]:
    said = "predicted" if explanation.predicted else "measured"
    return tuple(
        Figure(
            name=f"{name}: {LEDGER_WORDS[name]}",
            text=format_bytes(size),
            value=size,
            key=f"ledgers.{name}",
            words=said,
        )
        for name, size in reversed(explanation.ledgers.items())
    )


def _overrun(explanation: Explanation) -> Gauge | None:
    """The memory in use plus the failed request, against the limit."""
    if explanation.kind != "watch report":
        return None
    memory = explanation.details["memory"]
    own = memory["limit"] - memory["reserved"] <= memory["free"]
    limit = memory["limit"] if own else memory["total"]
    used = memory["reserved"] if own else memory["total"] - memory["free"]
    wanted = used + explanation.details["asked"]
    # Allocators take more than requested; a bar below the limit would suggest that it fits.
    return _gauge(wanted, wanted, wanted, limit) if wanted > limit else None


def _title(job: str, gpu: str | None) -> str:
    return f"{job} on {gpu or 'the CPU'}"


def _step(seconds: float, key: str, words: str) -> Figure:
    return Figure(name="a step", text=format_seconds(seconds), value=seconds, key=key, words=words)


def _ledgers(
    peak: Ledgers, key: str, intervals: dict[str, str], *, on_gpu: bool
) -> tuple[Figure, ...]:
    names = ("device", "reserved", "allocated") if on_gpu else ("allocated",)
    sizes = peak.as_dict()
    return tuple(
        Figure(
            name=f"{name}: {LEDGER_WORDS[name]}" if on_gpu else "tensors",
            text=format_bytes(sizes[name]),
            value=sizes[name],
            key=f"{key}.{name}",
            words=intervals.get(name, "") if on_gpu else "",
        )
        for name in names
    )


def _gauge(value: int, low: int, high: int, budget: int | None) -> Gauge | None:
    return Gauge(value=value, low=low, high=high, budget=budget) if budget is not None else None


def _without_changes(report: Report) -> Report:
    """The report without the table of changes, which has its own section on the page."""
    tables = tuple(table for table in report.tables if table.header[0] != "technique")
    return dataclasses.replace(report, tables=tables)
