"""Micro-batches as CUDA graphs, beside the same without: `python -m benchmarks.graphs --out OUT`.

Each job trains under the same choices twice, in one process: launched kernel by kernel, and as a
graph. Prints seconds of a step, losses and memory beside what is predicted; writes `graphs.json`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.plans import GPU
from benchmarks.real_steps import clock, environment, run_steps, set_up
from oomph.engine.applying import apply_choices
from oomph.engine.step import train_step
from oomph.hardware import find_gpu
from oomph.hardware.timing.clock import Clock
from oomph.jobs.job import Job
from oomph.jobs.sources import job_from_name
from oomph.plans.choices import KEEP, Choices
from oomph.plans.techniques import read_settings
from oomph.rehearsal.allocator import AllocatorSettings
from oomph.rehearsal.phases import rehearse
from oomph.rehearsal.replaying import replay
from oomph.search.survey import survey
from oomph.units import GIB

#: model, batch, seq, micro-batch, whether blocks are compiled
JOBS = (
    ("gpt2", 16, 512, 4, False),
    ("gpt2", 16, 512, 4, True),
    ("smollm2-135m", 16, 512, 4, True),
    ("llama-3.2-1b", 16, 2048, 1, True),
)
WARM_UP, TIMED = 4, 5
_STEPS = ("first step", "step")


def choices_of(job: Job, micro_batch: int, *, compiled: bool, graph: bool) -> Choices:
    """Everything kept; half-precision weights and a chunked loss where blocks are compiled."""
    card = find_gpu(GPU)
    found = survey(job, card, Clock.of(card), lambda *_: None)
    head = next(iter(found.heads), "")
    return Choices(
        precision="bf16-mixed",
        micro_batch=micro_batch,
        blocks={block.path: KEEP for block in found.blocks},
        compiled=compiled,
        compiled_others=found.others if compiled else (),
        head=head,
        loss_chunk=2048 if head else None,
        weights="bf16 with fp32 masters" if compiled else "own",
        techniques={"cuda_graph": read_settings("cuda_graph", {"enabled": graph})},
    )


def predict(job: Job, choices: Choices) -> int:
    """Bytes that the allocator hands out at the peak of a step."""
    phases = replay(rehearse(job, find_gpu(GPU), choices=choices), AllocatorSettings()).phases
    return max(peak.allocated for name, peak in phases.items() if name in _STEPS)


def measure(job: Job, choices: Choices) -> dict[str, Any]:
    """Train a few steps and clock some more."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    training = set_up(job)
    stage, undo = apply_choices(
        choices,
        dataclasses.replace(job, batch=training.batch),
        training.model,
        training.optimizer,
        device_type="cuda",
    )
    step = functools.partial(train_step, stage, training.batch)
    losses = run_steps(step, WARM_UP)
    seconds = clock(step, TIMED)
    allocated = torch.cuda.max_memory_allocated()
    undo()
    return {"seconds": seconds, "losses": losses, "allocated": allocated}


def render(rows: Sequence[dict[str, Any]]) -> str:
    """A table as markdown."""
    lines = [
        "| job | compiled | ms, launched | ms, graph | ratio | GiB, graph | predicted |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        plain, graph = row["plain"], row["graph"]
        lines.append(
            f"| {row['job']} | {'yes' if row['compiled'] else 'no'} | {1e3 * plain['seconds']:.1f}"
            f" | {1e3 * graph['seconds']:.1f} | {plain['seconds'] / graph['seconds']:.2f}"
            f" | {graph['allocated'] / GIB:.2f} | {row['predicted'] / GIB:.2f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all jobs, or those whose model is named."""
    parser = argparse.ArgumentParser(prog="benchmarks.graphs", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder for graphs.json")
    parser.add_argument("--models", default="", help="only these, separated by commas")
    options = parser.parse_args(arguments)
    rows = []
    for model, batch, seq, micro_batch, compiled in JOBS:
        if options.models and model not in options.models.split(","):
            continue
        job = job_from_name(
            model, batch=batch, seq=seq, precision="bf16-mixed", optimizer="adamw-fused"
        )
        row: dict[str, Any] = {
            "job": f"{model}, {batch} × {seq}, mb{micro_batch}",
            "compiled": compiled,
        }
        for name, graph in (("plain", False), ("graph", True)):
            choices = choices_of(job, micro_batch, compiled=compiled, graph=graph)
            row[name] = measure(job, choices)
            row["predicted"] = predict(job, choices)
        rows.append(row)
        options.out.mkdir(parents=True, exist_ok=True)
        document = {"schema": 1, "environment": environment(), "rows": rows}
        (options.out / "graphs.json").write_text(json.dumps(document, indent=1) + "\n")
    print(render(rows))


if __name__ == "__main__":
    main()
