"""Registers the rendering function of each result class on import."""

from __future__ import annotations

from pathlib import Path

from oomph.advising.advice import Advice
from oomph.explaining.comparing import Comparison
from oomph.explaining.explanation import Explanation
from oomph.plans.plan import Plan
from oomph.rehearsal.estimation import Estimate
from oomph.rendering import notebook_html_of, text_of, write_export, write_page
from oomph.report.advice import describe_advice
from oomph.report.comparisons import describe_comparison
from oomph.report.explanations import describe_explanation
from oomph.report.exports.formats import save_export
from oomph.report.findings import render_findings
from oomph.report.history import history_of
from oomph.report.html import render_html
from oomph.report.page.document import save_page
from oomph.report.page.sources import page_of_estimate, page_of_plan
from oomph.report.plan_questions import describe_best_cards, describe_planned_limit
from oomph.report.plans import describe_no_plan, describe_plan
from oomph.report.questions import describe_cards, describe_limit
from oomph.report.text import render_report, render_text
from oomph.search.attempt import NoPlan
from oomph.search.best_cards import BestCards
from oomph.search.cards import CardSurvey
from oomph.search.largest_planned import PlannedLimit
from oomph.search.limits import Limit

text_of.register(Estimate, render_text)
notebook_html_of.register(Estimate, render_html)


@text_of.register
def _(plan: Plan) -> str:
    return render_report(describe_plan(plan))


@text_of.register
def _(answer: NoPlan) -> str:
    return render_report(describe_no_plan(answer))


@text_of.register
def _(limit: Limit) -> str:
    return render_report(describe_limit(limit))


@text_of.register
def _(limit: PlannedLimit) -> str:
    return render_report(describe_planned_limit(limit))


@text_of.register
def _(survey: CardSurvey) -> str:
    return render_report(describe_cards(survey))


@text_of.register
def _(answer: BestCards) -> str:
    return render_report(describe_best_cards(answer))


@text_of.register
def _(advice: Advice) -> str:
    return render_findings(describe_advice(advice))


@text_of.register
def _(comparison: Comparison) -> str:
    return render_findings(describe_comparison(comparison))


@text_of.register
def _(explanation: Explanation) -> str:
    return render_findings(describe_explanation(explanation))


@write_page.register
def _(estimate: Estimate, path: str | Path) -> None:
    save_page(page_of_estimate(estimate), path)


@write_page.register
def _(plan: Plan, path: str | Path) -> None:
    save_page(page_of_plan(plan), path)


@write_export.register
def _(estimate: Estimate, path: str | Path) -> None:
    save_export(history_of(estimate), path)
