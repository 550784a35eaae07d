"""What block inputs on the host cost: `python -m benchmarks.offloaded_inputs --out OUT`.

The frontier's plans of the smallest budgets (`OUT/plans`, by `benchmarks.frontier --only-plans`)
leave inputs of recomputed blocks on the host. Each is run as planned and with these inputs on the
GPU, all else alike, in turns and in one process that may use the whole card. Prints seconds of a
step and their ratio; writes `offloaded-inputs.json`. `--budget N` leaves out the others; `--table
FILE` prints what a file holds.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.frontier import SUITES, plan_path
from benchmarks.real_steps import clock, environment, load_plan, run_steps, set_up
from oomph.plans.choices import Choices, offloaded
from oomph.plans.plan import Plan
from oomph.runs.run import apply

SUITE = SUITES["llama-3.2-1b"]
BUDGETS = (8, 12, 16)
#: Steps that compile and warm up, those that are timed at a time, and how often.
WARM_UP, TIMED, TURNS = 3, 4, 2


def with_inputs_kept(choices: Choices) -> Choices:
    """The same with nothing of the blocks' on the host but their weights."""
    mark = offloaded("")
    blocks = {path: how.partition(mark)[0] for path, how in choices.blocks.items()}
    return dataclasses.replace(choices, blocks=blocks)


def clocked(plan: Plan) -> tuple[float, list[float]]:
    """Seconds of a step under a plan, and the losses of the first ones."""
    gc.collect()
    torch.cuda.empty_cache()
    job = SUITE.job()
    training = set_up(job)
    training.model.cpu()
    job = dataclasses.replace(
        job, model=training.model, optimizer=training.optimizer, batch=training.batch
    )
    run = apply(plan, job, device=training.device)
    try:
        step = functools.partial(run.step, training.batch)
        losses = run_steps(step, WARM_UP)
        return clock(step, TIMED), losses
    finally:
        run.undo()


def compare(plan: Plan) -> dict[str, Any]:
    """Both ways, in turns."""
    kept = dataclasses.replace(plan, choices=with_inputs_kept(plan.choices))
    pairs = [(clocked(plan), clocked(kept)) for _ in range(TURNS)]
    return {
        "blocks": len(plan.choices.blocks),
        "offloaded": len(plan.choices.offloaded),
        "seconds": [away[0] for away, _ in pairs],
        "seconds_kept": [kept[0] for _, kept in pairs],
        "losses": pairs[0][0][1],
        "losses_kept": pairs[0][1][1],
    }


def render(document: Mapping[str, Any]) -> str:
    """A table as markdown."""
    lines = [
        "| budget | blocks whose inputs leave | ms | ms, inputs kept | cost |",
        "|---|---|---|---|---|",
    ]
    for budget, row in document["rows"].items():
        away, kept = (statistics.median(row[name]) for name in ("seconds", "seconds_kept"))
        lines.append(
            f"| {budget} GiB | {row['offloaded']} of {row['blocks']} | {1e3 * away:.1f}"
            f" | {1e3 * kept:.1f} | {away / kept - 1:+.1%} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each budget's plan, or print what was measured."""
    parser = argparse.ArgumentParser(prog="benchmarks.offloaded_inputs", description=__doc__)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--out", type=Path, help="the folder that has the frontier's plans")
    group.add_argument("--table", type=Path, help="print this file and run nothing")
    parser.add_argument("--budget", type=int, choices=BUDGETS, action="append")
    options = parser.parse_args(arguments)
    if options.table is not None:
        print(render(json.loads(options.table.read_text())))
        return
    document: dict[str, Any] = {"schema": 1, "environment": environment(), "rows": {}}
    for budget in options.budget or BUDGETS:
        plan = load_plan(plan_path(options.out, SUITE, budget))
        document["rows"][str(budget)] = compare(plan)
        text = json.dumps(document, indent=1) + "\n"
        (options.out / "offloaded-inputs.json").write_text(text)
    print(render(document))


if __name__ == "__main__":
    main()
