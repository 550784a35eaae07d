"""What leaves the GPU, oomph's way and its peers': `python -m benchmarks.offload --out OUT`.

Two jobs: a Llama of 3 B parameters in bf16 on 8 × 2048 tokens, and a full fine-tune of one of 8 B
parameters with fp32 masters on 16 × 2048. Peers run with Liger's kernels and gradient
checkpointing, each as its authors document it; oomph by its plans within budgets of device memory,
with exact clipping and without. Rows are set up side by side, in processes of their own, and stand
still while one of them is timed.

`offload.json` in OUT has the rows so far, and a second call runs only what is missing. Plans are
taken from `OUT/plans`; `--only-plans` makes them anywhere, with no GPU. `--table FILE` prints what
a file holds.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers import checkpoint, use_liger
from benchmarks.plans import GPU, load, plan_or_refusal, save
from benchmarks.real_steps import (
    OK,
    Step,
    Training,
    attempt,
    begin,
    clock,
    environment,
    load_plan,
    peaks,
    run_steps,
    set_up,
)
from benchmarks.side_by_side import Seat, SharedCard, Task
from oomph.jobs.job import Job, batch_size
from oomph.jobs.sources import job_from_name
from oomph.runs.run import apply
from oomph.units import GIB

CLIP_NORM = 1.0
LEARNING_RATE = 1e-5
NOT_INSTALLED = "not installed"

#: Seconds that a row may take, the steps before the timed ones, and those.
PATIENCE_S, WARM_UP, TIMED_STEPS = 400, 3, 3
#: Rows that are set up at a time: the host's memory is what they share.
AT_ONCE = 3

MakeStep = Callable[[Training], Step]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job that does not fit where it is to run."""

    name: str
    model: str
    batch: int
    seq: int
    precision: str
    budgets: tuple[float, ...]
    """GiB that oomph gets."""
    clips: tuple[bool, ...]
    """Whether oomph's rows clip."""
    on_host: bool
    """Whether everybody is given a model on the host: it takes most of the host's memory."""
    host: float | None = None
    """GiB of host memory that oomph's plans may take; the rest goes to the disk."""

    def job(self, *, clips: bool = True) -> Job:
        """The job as a user has it, untouched."""
        job = job_from_name(
            self.model,
            batch=self.batch,
            seq=self.seq,
            precision=self.precision,
            optimizer="adamw-fused",
        )
        return dataclasses.replace(job, clip_norm=CLIP_NORM if clips else None)

    @property
    def words(self) -> str:
        """The job in a line."""
        return f"{self.model}, {self.batch} × {self.seq}, {self.precision}"


THREE_B = Case(
    name="3b",
    model="llama-3.2-3b",
    batch=8,
    seq=2048,
    precision="bf16",
    budgets=(11.1, 8.0),
    clips=(False, True),
    on_host=False,
)
CASES = {
    "3b": THREE_B,
    "8b": Case(
        name="8b",
        model="llama-3.1-8b",
        batch=16,
        seq=2048,
        precision="bf16-mixed",
        budgets=(24.0,),
        clips=(False,),
        on_host=True,
    ),
    "3b-disk": dataclasses.replace(
        THREE_B, name="3b-disk", budgets=(11.1,), clips=(False,), host=14.0
    ),
}


# -- peers -----------------------------------------------------------------------------------------


def prepare(model: nn.Module) -> None:
    """Liger's kernels, where there is a card, and gradient checkpointing."""
    if torch.cuda.is_available():
        use_liger(model)
    checkpoint(model)


def torchao_offload(training: Training) -> Step:
    """State and gradients on the host. It cannot clip: gradients are gone when one would."""
    optim = importlib.import_module("torchao.optim")
    prepare(training.model)
    optimizer = optim.CPUOffloadOptimizer(
        training.model.parameters(),
        torch.optim.AdamW,
        offload_gradients=True,
        fused=True,
        lr=LEARNING_RATE,
    )
    return plain_step(training, optimizer, clip_norm=None)


def torchao_8bit(training: Training) -> Step:
    """State in 8 bits on the GPU; lossy."""
    optim = importlib.import_module("torchao.optim")
    prepare(training.model)
    optimizer = optim.AdamW8bit(
        training.model.parameters(), lr=LEARNING_RATE, bf16_stochastic_round=True
    )
    return plain_step(training, optimizer, clip_norm=CLIP_NORM)


def plain_step(training: Training, optimizer: Any, clip_norm: float | None) -> Step:
    """Forward, backward, clip, step."""

    def step() -> Tensor:
        loss: Tensor = training.model(**training.batch).loss
        loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(training.model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def deepspeed(stage: int, training: Training) -> Step:
    """ZeRO with the optimizer on the CPU; from stage 3 on, with the parameters there, too."""
    on_cpu = {"device": "cpu", "pin_memory": True}
    settings = {
        "train_micro_batch_size_per_gpu": batch_size(training.batch),
        "gradient_clipping": CLIP_NORM,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "offload_optimizer": on_cpu,
            **({"offload_param": on_cpu} if stage == 3 else {}),
        },
    }
    # Each process is a world of its own; their ports must not meet.
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    port = str(20_000 + os.getpid() % 20_000)
    os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    prepare(training.model)
    engine, *_ = importlib.import_module("deepspeed").initialize(
        model=training.model, model_parameters=training.model.parameters(), config=settings
    )

    def step() -> Tensor:
        loss: Tensor = engine(**training.batch).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to train, and what it needs installed."""

    name: str
    make_step: MakeStep
    needs: tuple[str, ...] = ()
    budget: float | None = None
    """GiB of device memory; None is all the card has."""
    room: float = 40.0
    """GiB that it takes at most, where it has no budget."""
    from_host: bool = False
    """Whether it is given a model on the host, and brings it to the card by itself."""
    fills_host: bool = False
    """Whether the host has no memory for anybody else beside it."""

    @property
    def is_installed(self) -> bool:
        """Whether the packages it needs are there."""
        return all(importlib.util.find_spec(package) is not None for package in self.needs)


ZERO_3 = Row(
    name="DeepSpeed ZeRO-3, optimizer and parameters on CPU",
    make_step=functools.partial(deepspeed, 3),
    needs=("deepspeed", "liger_kernel"),
    fills_host=True,
)
PEERS = {
    "3b": (
        Row(
            name="torchao CPUOffloadOptimizer, gradients offloaded (no clipping)",
            make_step=torchao_offload,
            needs=("torchao", "liger_kernel"),
        ),
        Row(
            name="torchao AdamW8bit, stochastic rounding (lossy)",
            make_step=torchao_8bit,
            needs=("torchao", "liger_kernel"),
        ),
        Row(
            name="DeepSpeed ZeRO-2, optimizer on CPU",
            make_step=functools.partial(deepspeed, 2),
            needs=("deepspeed", "liger_kernel"),
            fills_host=True,
        ),
        ZERO_3,
    ),
    "8b": (ZERO_3,),
    "3b-disk": (),
}


# -- oomph -----------------------------------------------------------------------------------------


def plan_path(out: Path, case: Case, budget: float, *, clips: bool) -> Path:
    """Where oomph's plan for a row is kept."""
    return out / "plans" / f"{case.name}-{budget:g}{'-clipped' if clips else ''}.json"


def make_plans(cases: Sequence[Case], out: Path) -> None:
    """Make the plans that are not there yet."""
    for case, budget, clips in _rows_of_oomph(cases):
        path = plan_path(out, case, budget, clips=clips)
        if not path.exists():
            host = int(case.host * GIB) if case.host is not None else None
            answer = plan_or_refusal(case.job(clips=clips), int(budget * GIB), host)
            path.parent.mkdir(parents=True, exist_ok=True)
            save(path, answer)
            print(f"{path.stem}: {answer.get('error', 'planned')}", flush=True)


def _rows_of_oomph(cases: Sequence[Case]) -> list[tuple[Case, float, bool]]:
    return [
        (case, budget, clips) for case in cases for budget in case.budgets for clips in case.clips
    ]


def by_plan(case: Case, path: Path, clips: bool, training: Training) -> Step:
    """What a plan says."""
    job = dataclasses.replace(
        case.job(clips=clips),
        model=training.model,
        optimizer=training.optimizer,
        batch=training.batch,
    )
    run = apply(load_plan(path), job, device=training.device)
    return functools.partial(run.step, training.batch)


def oomph_rows(case: Case, out: Path) -> list[Row]:
    """oomph within each budget, by its plan."""
    rows = []
    for _, budget, clips in _rows_of_oomph([case]):
        path = plan_path(out, case, budget, clips=clips)
        clipped = "clipped" if clips else "no clipping"
        rows.append(
            Row(
                name=f"oomph within {budget:g} GiB, {clipped}",
                make_step=functools.partial(by_plan, case, path, clips),
                budget=budget,
                from_host=True,
            )
        )
    return rows


# -- running ---------------------------------------------------------------------------------------


def run_row(case: Case, row: Row, seat: Seat) -> dict[str, Any]:
    """A row's cell, in this process."""

    def run() -> dict[str, Any]:
        training = set_up(case.job())
        for group in training.optimizer.param_groups:
            group["lr"] = LEARNING_RATE
        if row.from_host or case.on_host:
            training.model.cpu()
        begin(training, None if row.budget is None else int(row.budget * GIB))
        step = row.make_step(training)
        losses = run_steps(step, WARM_UP)
        retries = peaks()["retries"]
        with seat.alone():
            seconds = clock(step, TIMED_STEPS)
        tokens = training.batch["input_ids"].numel()
        found = {"rate": tokens / seconds, "seconds": seconds, "losses": losses, **peaks()}
        return found | {"retries_while_timed": found["retries"] - retries}

    began = time.perf_counter()
    cell = attempt(run)
    return cell | {"whole_seconds": time.perf_counter() - began, "environment": environment()}


def results_path(out: Path, case: Case) -> Path:
    """Where a case's rows are kept."""
    return out / f"offload-{case.name}.json"


def put(out: Path, case: Case, name: str, cell: dict[str, Any]) -> None:
    """Write a row's cell beside the others."""
    document = load(results_path(out, case), {"schema": 1, "job": case.words, "rows": {}})
    document["rows"][name] = cell
    out.mkdir(parents=True, exist_ok=True)
    save(results_path(out, case), document)
    print(f"{case.name}: {name}: {_rate(cell)} {cell.get('error', '')[-300:]}", flush=True)


def tasks_of(case: Case, rows: Sequence[Row], out: Path) -> list[Task]:
    """What is not there yet, as work for processes."""
    done = load(results_path(out, case), {"rows": {}})["rows"]
    tasks = []
    for row in rows:
        if done.get(row.name, {"status": NOT_INSTALLED})["status"] != NOT_INSTALLED:
            continue
        if not row.is_installed:
            put(out, case, row.name, {"status": NOT_INSTALLED})
            continue
        tasks.append(_task(case, row, out))
    return tasks


def _task(case: Case, row: Row, out: Path) -> Task:
    def work(seat: Seat) -> None:
        seat.tell(run_row(case, row, seat))

    def hear(cell: dict[str, Any]) -> None:
        put(out, case, row.name, cell)

    def end(how: dict[str, str]) -> None:
        if how:
            put(out, case, row.name, how)

    return Task(needs=int((row.budget or row.room) * GIB), work=work, hear=hear, end=end)


def render(document: Mapping[str, Any]) -> str:
    """A case's table as markdown."""
    lines = [
        document["job"],
        "",
        "| who | tokens/s | peak GiB | reserved GiB |",
        "| --- | --- | --- | --- |",
    ]
    for name, cell in document["rows"].items():
        sizes = [
            f"{cell[key] / GIB:.2f}" if key in cell else "" for key in ("allocated", "reserved")
        ]
        lines.append(f"| {' | '.join([name, _rate(cell), *sizes])} |")
    return "\n".join(lines)


def _rate(cell: Mapping[str, Any]) -> str:
    return f"{cell['rate']:,.0f}" if cell["status"] == OK else str(cell["status"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Make plans, run what is missing, or print what was run."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(prog="benchmarks.offload", description=__doc__)
    parser.add_argument("--out", type=Path, help="the folder for results and plans")
    parser.add_argument("--case", choices=list(CASES), action="append", help="leave out the others")
    parser.add_argument("--only", choices=["oomph", "peers"])
    parser.add_argument("--only-plans", action="store_true", help=f"make plans for {GPU}, no more")
    parser.add_argument("--time-limit", type=float, default=3600, help="seconds for all rows")
    parser.add_argument("--table", type=Path, help="print this file and run nothing")
    options = parser.parse_args(arguments)
    if options.table:
        print(render(json.loads(options.table.read_text())))
        return
    if options.out is None:
        parser.error("give --out")
    deadline = time.monotonic() + options.time_limit
    cases = [CASES[name] for name in options.case or CASES]
    if options.only != "peers":
        make_plans(cases, options.out)
    if options.only_plans:
        return
    for case in cases:
        rows = [
            *(oomph_rows(case, options.out) if options.only != "peers" else ()),
            *(PEERS[case.name] if options.only != "oomph" else ()),
        ]
        for alone in (False, True):
            some = [row for row in rows if (row.fills_host or case.on_host) is alone]
            at_once = 1 if alone else AT_ONCE
            card = SharedCard(at_once=at_once, patience=PATIENCE_S, deadline=deadline)
            card.run(tasks_of(case, some, options.out))
        print(render(load(results_path(options.out, case), {"job": case.words, "rows": {}})))


if __name__ == "__main__":
    main()
