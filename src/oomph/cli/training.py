"""`oomph train`: train under a plan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from oomph.cli.app import EXIT_CODES, answer, clean_stdout, working, write_json
from oomph.cli.options import (
    AsJson,
    BudgetOption,
    HtmlOption,
    JobOptions,
    PlanOptions,
    with_groups,
)
from oomph.cli.saving import check_files, save_html
from oomph.errors import BadInput
from oomph.report.plans import describe_attempt
from oomph.report.text import print_table
from oomph.report.trained import describe_step, describe_training

if TYPE_CHECKING:
    import torch

    from oomph.jobs.job import Job
    from oomph.plans.plan import Plan
    from oomph.runs.loading import Resumed, Stored
    from oomph.runs.training import Trained
    from oomph.search.attempt import Attempt


_PlanFile = Annotated[
    str | None, typer.Option("--plan", metavar="FILE", help="A plan of `oomph plan --save FILE`.")
]


@with_groups
def train(
    options: JobOptions,
    how: PlanOptions,
    budget: BudgetOption = None,
    plan_file: _PlanFile = None,
    steps: Annotated[int, typer.Option(min=1, help="The optimizer step to train up to.")] = 10,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="cpu or cuda. Default: cuda if there.")
    ] = None,
    save: Annotated[
        str | None,
        typer.Option("--save", metavar="DIR", help="Write checkpoints there; the last two stay."),
    ] = None,
    save_every: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="After every N steps. Default: after the last."),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Go on from the newest checkpoint there, under its plan unless another is asked"
            " for. If it is also where to save, it may still be empty.",
        ),
    ] = None,
    html: HtmlOption = None,
    elastic: Annotated[
        bool,
        typer.Option("--elastic", help="Follow the memory there is, with plans made ahead."),
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Train under a plan for real, and compare what it takes with the prediction.

    A model by name or config trains on random numbers. A factory, file.py:function, may return its
    job and a loader of batches; a job alone trains on its own batch.

    Exit codes: 0 trained, 3 no plan fits, 2 usage, 1 internal.
    """
    _check_plan_file(plan_file, budget, how)
    check_files(html, None)
    if save_every is not None and save is None:
        raise BadInput("--save-every needs a place: add --save DIR")
    with working(f"planning {options.model}") as say:
        import torch

        from oomph.jobs.sources import job_to_train
        from oomph.report.page.sources import page_of_attempt, page_of_training
        from oomph.runs.training import Saving, Trained, choose_device
        from oomph.runs.training import train as take_steps
        from oomph.search.attempt import NoPlan

        target = choose_device(device)
        stored = _checkpoint_to_resume(resume, save)
        saved = _saved_plan(plan_file, stored, asked=budget is not None or any(how.changed()))
        torch.manual_seed(0)
        job, loader = job_to_train(**options.source())
        plan = saved or _new_plan(job, budget, how, target, say)
    if isinstance(plan, NoPlan):
        save_html(html, lambda: page_of_attempt(plan))
        return answer(plan, describe_attempt(plan), as_json)
    with _progress(steps) as show:
        taken = []
        for done in take_steps(
            plan,
            job,
            device=target,
            steps=steps,
            loader=loader,
            saving=Saving(folder=Path(save), every=save_every) if save is not None else None,
            resume=stored,
            tell=_tell,
            elastic=elastic,
        ):
            taken.append(done)
            show(done.step, describe_step(done, plan))
    trained = Trained(plan=plan, device=target.type, steps=tuple(taken))
    save_html(html, lambda: page_of_training(trained))
    return _print(trained, as_json)


def _checkpoint_to_resume(resume: str | None, save: str | None) -> Stored | None:
    """The newest checkpoint there; None to begin anew, as in a folder to save in that is empty."""
    from oomph.runs.checkpoint_folder import checkpoints
    from oomph.runs.loading import Stored

    if resume is None or (resume == save and not checkpoints(Path(resume))):
        return None
    return Stored(Path(resume))


def _saved_plan(plan_file: str | None, stored: Stored | None, *, asked: bool) -> Plan | None:
    """The plan of a file, or of the checkpoint unless another is asked for."""
    from oomph.plans.plan import Plan

    if plan_file is not None:
        return Plan.load(plan_file)
    return stored.plan() if stored is not None and not asked else None


def _new_plan(
    job: Job, budget: str | None, how: PlanOptions, target: torch.device, say: Callable[[str], None]
) -> Attempt:
    from oomph.runs.run import free_host_memory
    from oomph.runs.training import card_of
    from oomph.search.attempt import try_plan

    under = how.as_arguments()
    if how.host is None:
        under["host"] = free_host_memory(job.model, target)
    return try_plan(job, budget=budget, gpu=card_of(target), say=say, **under)


def _check_plan_file(plan_file: str | None, budget: str | None, how: PlanOptions) -> None:
    given = [*(["--budget"] if budget is not None else []), *how.changed()]
    if plan_file is not None and given:
        raise BadInput(f"--plan has its own {', '.join(given).replace('--', '')}; use one of them")


def _tell(resumed: Resumed) -> None:
    """Print to stderr what was loaded from a checkpoint."""
    console = Console(stderr=True)
    lines = [
        f"resumed: step {resumed.step} of {resumed.path}",
        *map("note: {}".format, resumed.notes),
    ]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)


@contextlib.contextmanager
def _progress(steps: int) -> Iterator[Callable[[int, str], None]]:
    """Show a progress bar if stderr is a terminal; yields the function to call after each step."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TextColumn("{task.fields[words]}", markup=False),
    )
    with (
        clean_stdout(),
        Progress(*columns, console=console, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("training", total=steps, words="")
        yield lambda step, words: bar.update(task, completed=step, words=words)


def _print(trained: Trained, as_json: bool) -> int:
    if as_json:
        write_json(trained.as_dict())
    else:
        console = Console()
        headline, table = describe_training(trained)
        console.print(f"trained: {headline}", soft_wrap=True, highlight=False, markup=False)
        console.print(
            f"The plan: {trained.plan.summary}.",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )
        if (saved := trained.steps[-1].saved) is not None:
            console.print(f"Saved: {saved}", soft_wrap=True, highlight=False, markup=False)
        console.print()
        print_table(table, console)
    return EXIT_CODES[trained.plan.verdict]
