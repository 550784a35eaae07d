"""Seconds that were timed against real ones: `python -m benchmarks.timed_blocks --out FILE`.

Each job is fitted into its budget on the card by `fit(time_blocks=True)`, in a process of its own,
and trained for some steps. Prints predicted beside measured seconds and memory. `--only NAME`
leaves out the others; `--table FILE` prints what a file holds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.plans import load, save
from benchmarks.real_steps import OK, attempt, clock, environment, peaks, run_steps, set_up, summary
from oomph.jobs.sources import job_from_name
from oomph.runs.run import fit
from oomph.units import GIB

#: Steps that compile and warm up, and those that are timed.
WARM_UP, TIMED_STEPS = 3, 5


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A model of the catalogue, its batch and the memory it gets."""

    model: str
    batch: int
    seq: int | None = None
    budget: float
    """GiB of device memory."""


JOBS = (
    Timed(model="llama-3.2-1b", batch=16, seq=2048, budget=24),
    Timed(model="vit-large", batch=256, budget=16),
    Timed(model="gpt2-medium", batch=16, seq=1024, budget=12),
    Timed(model="modernbert-base", batch=16, seq=1024, budget=12),
)


def run_job(timed: Timed) -> dict[str, Any]:
    """Fit it, train it, and say what was predicted and what was found."""
    job = job_from_name(
        timed.model,
        batch=timed.batch,
        seq=timed.seq,
        precision="bf16-mixed",
        optimizer="adamw-fused",
    )
    training = set_up(job)
    run = fit(
        training.model,
        training.optimizer,
        job.loss,
        training.batch,
        budget=int(timed.budget * GIB),
        time_blocks=True,
        precision="bf16-mixed",
    )

    def step() -> Any:
        return run.step(training.batch)

    losses = run_steps(step, WARM_UP)
    predicted = run.plan.predicted
    return {
        "losses": losses,
        "seconds": clock(step, TIMED_STEPS),
        "predicted_seconds": predicted.seconds,
        "predicted_reserved": predicted.peak.reserved,
        "planning_seconds": run.plan.planning_seconds,
        "summary": summary(run.plan),
        **peaks(),
        **environment(),
    }


def _send(pipe: Any, timed: Timed) -> None:
    pipe.send(attempt(lambda: run_job(timed)))


def in_its_own_process(timed: Timed) -> dict[str, Any]:
    """What a job came to; its memory is its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, timed))
    process.start()
    theirs.close()
    try:
        return dict(ours.recv())
    except EOFError:
        return {"status": "ended without a word"}
    finally:
        process.join()


def render(document: dict[str, Any]) -> str:
    """What was found as markdown."""
    lines = [
        "| job | budget GiB | s predicted | s measured | error % | planned in s | outcome |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in document["jobs"].items():
        cells = [name, f"{found['budget']:g}"]
        if found["status"] == OK:
            error = 100 * (found["seconds"] / found["predicted_seconds"] - 1)
            cells += [f"{found[key]:.4f}" for key in ("predicted_seconds", "seconds")]
            cells += [f"{error:+.1f}", f"{found['planning_seconds']:.1f}"]
        else:
            cells += ["", "", "", ""]
        lines.append(f"| {' | '.join([*cells, found['status']])} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the jobs, or print what was found."""
    parser = argparse.ArgumentParser(prog="benchmarks.timed_blocks", description=__doc__)
    parser.add_argument("--out", type=Path, help="the file for what is found")
    parser.add_argument("--only", choices=[job.model for job in JOBS], action="append")
    parser.add_argument("--table", type=Path, help="print this file and run nothing")
    options = parser.parse_args(arguments)
    if options.table is not None:
        print(render(json.loads(options.table.read_text())))
        return
    if options.out is None:
        parser.error("give --out to run, or --table to print")
    document = load(options.out, {"schema": 1, "jobs": {}})
    for timed in JOBS:
        if not options.only or timed.model in options.only:
            found = in_its_own_process(timed)
            document["jobs"][timed.model] = asdict(timed) | found
            save(options.out, document)
            print(f"{timed.model}: {found['status']} {found.get('error', '')[-800:]}", flush=True)
    print(render(document))


if __name__ == "__main__":
    main()
