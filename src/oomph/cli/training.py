"""`oomph train`: a plan, run for real."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from oomph.cli.app import EXIT_CODES, answer, clean_stdout, working, write_json
from oomph.cli.options import AsJson, BudgetOption, JobOptions, PlanOptions, with_groups
from oomph.errors import BadInput
from oomph.reporting.plans import describe_attempt, describe_plan_briefly
from oomph.reporting.text import print_table
from oomph.reporting.trained import describe_step, describe_training

if TYPE_CHECKING:
    from oomph.running.training import Trained


@with_groups
def train(
    options: JobOptions,
    how: PlanOptions,
    budget: BudgetOption = None,
    plan_file: Annotated[
        str | None,
        typer.Option("--plan", metavar="FILE", help="A plan of `oomph plan --save FILE`."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to take.")] = 10,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="cpu or cuda. Default: cuda if there.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Train under a plan for real, and compare what it takes with the prediction.

    A model by name or config trains on random numbers. A factory, file.py:function, may return its
    job and a loader of batches; a job alone trains on its own batch.

    Exit codes: 0 trained, 3 no plan fits, 2 usage, 1 internal.
    """
    _check_plan_file(plan_file, budget, how)
    with working(f"planning {options.model}") as say:
        import torch

        from oomph.job_sources import job_to_train
        from oomph.planning.attempt import Attempt, NoPlan, try_plan
        from oomph.planning.plan import Plan
        from oomph.running.training import Trained, card_of, choose_device
        from oomph.running.training import train as take_steps

        target = choose_device(device)
        saved = Plan.load(plan_file) if plan_file is not None else None
        torch.manual_seed(0)
        job, loader = job_to_train(**options.source())
        plan: Attempt = saved or try_plan(
            job, budget=budget, gpu=card_of(target), say=say, **how.as_arguments()
        )
    if isinstance(plan, NoPlan):
        return answer(plan, describe_attempt(plan), as_json)
    with _progress(steps) as show:
        taken = []
        for done in take_steps(plan, job, device=target, steps=steps, loader=loader):
            taken.append(done)
            show(done.step, describe_step(done, plan))
    return _print(Trained(plan=plan, device=target.type, steps=tuple(taken)), as_json)


def _check_plan_file(plan_file: str | None, budget: str | None, how: PlanOptions) -> None:
    given = [*(["--budget"] if budget is not None else []), *how.changed()]
    if plan_file is not None and given:
        raise BadInput(f"--plan has its own {', '.join(given).replace('--', '')}; use one of them")


@contextlib.contextmanager
def _progress(steps: int) -> Iterator[Callable[[int, str], None]]:
    """A bar on a terminal, nothing elsewhere; what it gives is told of each step."""
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
            f"The plan: {describe_plan_briefly(trained.plan)}.",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )
        console.print()
        print_table(table, console)
    return EXIT_CODES[trained.plan.verdict]
