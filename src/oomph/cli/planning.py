"""`oomph plan`: the fastest way to make a job fit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oomph.cli.app import answer, working
from oomph.cli.options import (
    ANY_GPU,
    DEFAULT_GPU,
    AsJson,
    BudgetOption,
    ExportOption,
    HtmlOption,
    JobOptions,
    PlanOptions,
    SolveOption,
    with_groups,
)
from oomph.cli.saving import check_files, save_exports, save_html
from oomph.cli.solving import check_solvable, sizes
from oomph.errors import BadInput
from oomph.report.plan_questions import describe_best_cards, describe_planned_limit
from oomph.report.plans import describe_attempt

if TYPE_CHECKING:
    from oomph.search.attempt import Attempt


@with_groups
def plan(
    options: JobOptions,
    how: PlanOptions,
    gpu: Annotated[
        str,
        typer.Option(
            "--gpu",
            metavar="NAME",
            help="A card of `oomph gpus`, cpu, or any: the fastest and the cheapest of the cards.",
        ),
    ] = DEFAULT_GPU,
    budget: BudgetOption = None,
    solve: SolveOption = None,
    prices: Annotated[
        str | None,
        typer.Option(
            "--prices",
            metavar="FILE",
            help="With --gpu any: dollars an hour by card, as TOML; ranks its cards by cost.",
        ),
    ] = None,
    save: Annotated[
        str | None, typer.Option("--save", metavar="FILE", help="Write the plan's JSON there.")
    ] = None,
    html: HtmlOption = None,
    export: ExportOption = None,
    as_json: AsJson = False,
) -> int:
    """Find the fastest way to run a training step in the memory there is, with no GPU.

    Exit codes: 0 fits, 3 does not fit, 2 usage, 1 internal.
    """
    check_solvable(solve, options, gpu)
    _check_files(gpu, prices, save)
    check_files(html, export, many=gpu == ANY_GPU)
    with working(f"planning {options.model}") as say:
        from oomph.hardware.prices import load_prices
        from oomph.search.attempt import try_plan
        from oomph.search.best_cards import best_cards
        from oomph.search.largest_planned import largest_planned

        card = None if gpu == "cpu" else gpu
        under: dict[str, Any] = {"budget": budget, **how.as_arguments(), "say": say}
        if gpu == ANY_GPU:
            costs = load_prices(prices) if prices is not None else None
            best = best_cards(options.job(), prices=costs, **under)
        elif solve is not None:
            varied = sizes(solve, options, say, "oomph.largest_planned")
            limit = largest_planned(gpu=card, **varied, **under)
        else:
            attempt = try_plan(options.job(), gpu=card, **under)
    if gpu == ANY_GPU:
        return answer(best, describe_best_cards(best), as_json)
    if solve is not None:
        _save(limit.attempt, save, html, export)
        return answer(limit, describe_planned_limit(limit), as_json)
    _save(attempt, save, html, export)
    return answer(attempt, describe_attempt(attempt), as_json)


def _check_files(gpu: str, prices: str | None, save: str | None) -> None:
    """Refuse unusable files before planning."""
    if prices is not None and gpu != ANY_GPU:
        raise BadInput("--prices compares cards: use it with --gpu any")
    if save is not None and gpu == ANY_GPU:
        raise BadInput("--save writes the plan for one card, not any; name the card with --gpu")
    if save is not None and not Path(save).parent.is_dir():
        raise BadInput(f"cannot save the plan: there is no folder {Path(save).parent}")


def _save(attempt: Attempt, path: str | None, html: str | None, export: list[str] | None) -> None:
    from oomph.report.page.sources import page_of_attempt
    from oomph.search.attempt import NoPlan

    save_html(html, lambda: page_of_attempt(attempt))
    if isinstance(attempt, NoPlan):
        return
    save_exports(export, attempt.checked)
    if path is not None:
        attempt.save(path)
