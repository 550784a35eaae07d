"""`oomph estimate` and `oomph rehearse`: does the unchanged job fit?"""

from __future__ import annotations

from typing import Annotated, Any

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
    SolveOption,
    with_groups,
)
from oomph.cli.saving import check_files, save_estimate
from oomph.cli.solving import check_solvable, sizes
from oomph.report.questions import describe_cards, describe_limit
from oomph.report.report import describe


@with_groups
def estimate(
    options: JobOptions,
    gpu: Annotated[
        str,
        typer.Option(
            "--gpu",
            metavar="NAME",
            help="A card of `oomph gpus`, cpu, or any: which of the cards would hold it.",
        ),
    ] = DEFAULT_GPU,
    budget: BudgetOption = None,
    solve: SolveOption = None,
    phase: Annotated[
        list[str] | None,
        typer.Option(
            help="build, first-step, step, later-steps, eval or save. Repeatable; default: all."
        ),
    ] = None,
    allocator: Annotated[
        str,
        typer.Option(
            "--allocator",
            metavar="OPTIONS",
            help='As PYTORCH_CUDA_ALLOC_CONF: "expandable_segments:True".',
        ),
    ] = "",
    html: HtmlOption = None,
    export: ExportOption = None,
    as_json: AsJson = False,
) -> int:
    """Predict the peak memory of a training step, with no GPU.

    Exit codes: 0 fits, 3 does not fit, 5 inconclusive, 2 usage, 1 internal.
    """
    check_solvable(solve, options, gpu)
    check_files(html, export, many=gpu == ANY_GPU)
    with working(f"rehearsing {options.model}") as say:
        from oomph.rehearsal.estimation import estimate as predict
        from oomph.rehearsal.phases import PHASES
        from oomph.search.cards import survey_cards
        from oomph.search.limits import largest

        card = None if gpu == "cpu" else gpu
        under: dict[str, Any] = {
            "budget": budget,
            "phases": [name.replace("-", " ") for name in phase] if phase else PHASES,
            "allocator": allocator,
        }
        if solve is not None:
            varied = sizes(solve, options, say, "oomph.largest")
            limit = largest(gpu=card, **varied, **under)
        elif gpu == ANY_GPU:
            survey = survey_cards(options.job(), **under)
        else:
            result = predict(options.job(), card, **under)
    if solve is not None:
        save_estimate(limit.estimate, html, export)
        return answer(limit, describe_limit(limit), as_json)
    if gpu == ANY_GPU:
        return answer(survey, describe_cards(survey), as_json)
    save_estimate(result, html, export)
    return answer(result, describe(result), as_json)


def rehearse(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A training script, unmodified.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Passed to the script.")
    ] = None,
    gpu: Annotated[
        str, typer.Option("--gpu", metavar="NAME", help="The card the script shall believe in.")
    ] = DEFAULT_GPU,
    budget: BudgetOption = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps after which it is stopped.")] = 2,
    html: HtmlOption = None,
    export: ExportOption = None,
    as_json: AsJson = False,
) -> int:
    """Predict the peak memory of a training script as it is, with no GPU.

    Options come before the script, the script's own arguments after it.

    What the script prints goes to stderr. Exit codes are those of estimate.
    """
    check_files(html, export)
    from oomph.rehearsal.script import estimate_script

    result = estimate_script(
        script, arguments or (), gpu=gpu, budget=budget, steps=steps, stdout_to_stderr=True
    )
    save_estimate(result, html, export)
    return answer(result, describe(result), as_json)
