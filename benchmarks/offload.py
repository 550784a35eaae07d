"""Optimizers off the GPU, oomph's and its peers': `python -m benchmarks.offload --out OUT`.

Everybody trains a Llama of 3 B parameters in bf16 on 8 × 2048 tokens: peers with Liger's kernels
and gradient checkpointing, each as its authors document it; oomph within budgets of device memory,
with exact clipping. Each row runs in a process of its own; `offload.json` in OUT has the rows so
far, and a second call runs only what is missing. A plan for a budget is taken from
`OUT/plans/BUDGET.json` where there is one, else the settings below are. `--table FILE` prints what
a file holds anywhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers import checkpoint, use_liger
from benchmarks.real_steps import (
    OK,
    Step,
    Training,
    attempt,
    begin,
    clock,
    environment,
    peaks,
    run_steps,
    set_up,
)
from oomph.host.cuda_link import CudaLink
from oomph.host.link import InstantLink, Link
from oomph.job import Job, batch_size, compute_loss, repeated_blocks, split_batch
from oomph.job_sources import job_from_name
from oomph.planning.choices import RECOMPUTE, Choices
from oomph.planning.plan import Plan
from oomph.running.applying import apply_choices
from oomph.running.run import apply
from oomph.techniques.host_optimizer import HostOptimizer, HostPlacement
from oomph.units import GIB

MODEL, BATCH, SEQ = "llama-3.2-3b", 8, 2048
CLIP_NORM = 1.0
LEARNING_RATE = 1e-5
NOT_INSTALLED = "not installed"

#: Seconds that a row may take, and the steps that are timed.
PATIENCE_S, TIMED_STEPS = 300, 3

MakeStep = Callable[[Training], Step]


def make_job() -> Job:
    """The job as a user has it, untouched."""
    job = job_from_name(MODEL, batch=BATCH, seq=SEQ, precision="bf16", optimizer="adamw-fused")
    return dataclasses.replace(job, clip_norm=CLIP_NORM)


# -- peers -----------------------------------------------------------------------------------------


def prepare(model: nn.Module) -> None:
    """Liger's kernels, where the model runs on a card, and gradient checkpointing."""
    if next(model.parameters()).is_cuda:
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
    return _plain_step(training, optimizer, clip_norm=None)


def torchao_8bit(training: Training) -> Step:
    """State in 8 bits on the GPU; lossy."""
    optim = importlib.import_module("torchao.optim")
    prepare(training.model)
    optimizer = optim.AdamW8bit(
        training.model.parameters(), lr=LEARNING_RATE, bf16_stochastic_round=True
    )
    return _plain_step(training, optimizer, clip_norm=CLIP_NORM)


def _plain_step(training: Training, optimizer: Any, clip_norm: float | None) -> Step:
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
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
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

    @property
    def is_installed(self) -> bool:
        """Whether the packages it needs are there."""
        return all(importlib.util.find_spec(package) is not None for package in self.needs)


PEERS = (
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
    ),
    Row(
        name="DeepSpeed ZeRO-3, optimizer and parameters on CPU",
        make_step=functools.partial(deepspeed, 3),
        needs=("deepspeed", "liger_kernel"),
    ),
)


# -- oomph -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What oomph does where no plan says it."""

    placement: HostPlacement
    loss_chunk: int = 1024
    micro_batch: int | None = None
    compiled: bool = True


def by_settings(settings: Settings, training: Training) -> Step:
    """All blocks recomputed and compiled, the loss in chunks, the optimizer on the host."""
    blocks = repeated_blocks(training.model)
    paths = [path for path, module in training.model.named_modules() if module in blocks]
    choices = Choices(
        precision="bf16",
        blocks=dict.fromkeys(paths, RECOMPUTE),
        compiled=settings.compiled,
        head="lm_head",
        loss_chunk=settings.loss_chunk,
    )
    job = dataclasses.replace(
        make_job(), model=training.model, optimizer=training.optimizer, batch=training.batch
    )
    stage, _ = apply_choices(
        choices, job, training.model, training.optimizer, device_type=training.device_type
    )
    host = HostOptimizer(
        training.model,
        training.optimizer,
        _link(training),
        settings.placement,
        blocks=blocks,
        clip_norm=CLIP_NORM,
    )
    total = batch_size(training.batch)
    parts = split_batch(training.batch, settings.micro_batch or total)

    def step() -> Tensor:
        losses = []
        for part in parts:
            loss = compute_loss(stage.job, training.model, part) * (batch_size(part) / total)
            with host.backward(last=part is parts[-1]):
                loss.backward()
            losses.append(loss.detach())
            del loss
        host.step()
        return torch.stack(losses).sum()

    return step


def _link(training: Training) -> Link:
    device = next(training.model.parameters()).device
    return CudaLink(device) if device.type == "cuda" else InstantLink()


def by_plan(path: Path, training: Training) -> Step:
    """What a plan says."""
    job = dataclasses.replace(
        make_job(), model=training.model, optimizer=training.optimizer, batch=training.batch
    )
    run = apply(Plan.load(path), job)
    return functools.partial(run.step, training.batch)


#: By budget and name. Within 11.1 GiB there is room for some gradients to wait on the GPU.
SETTINGS: Mapping[float, Mapping[str, Settings]] = {
    11.1: {
        "streamed": Settings(placement=HostPlacement(keep_gradients=2 * GIB, ahead=4)),
        "half by the host": Settings(
            placement=HostPlacement(host_share=0.5, keep_gradients=2 * GIB, ahead=4)
        ),
        "all by the host": Settings(placement=HostPlacement(host_share=1.0)),
    },
    8.0: {
        "streamed, mb2": Settings(
            placement=HostPlacement(keep_gradients=0, bucket=16 << 20), micro_batch=2
        ),
    },
}


def oomph_rows(out: Path) -> list[Row]:
    """oomph within each budget: by its plan, or by the settings above."""
    rows = []
    for budget, ways in SETTINGS.items():
        plan = out / "plans" / f"{budget:g}.json"
        steps: dict[str, MakeStep] = {
            way: functools.partial(by_settings, settings) for way, settings in ways.items()
        }
        if plan.exists():
            steps = {"planned": functools.partial(by_plan, plan)}
        rows += [
            Row(name=f"oomph within {budget:g} GiB, {way}", make_step=step, budget=budget)
            for way, step in steps.items()
        ]
    return rows


# -- running ---------------------------------------------------------------------------------------


def run_row(row: Row) -> dict[str, Any]:
    """A row's cell, in this process."""

    def run() -> dict[str, Any]:
        training = set_up(make_job())
        begin(training, None if row.budget is None else int(row.budget * GIB))
        step = row.make_step(training)
        losses = run_steps(step, 3)
        seconds = clock(step, TIMED_STEPS)
        tokens = training.batch["input_ids"].numel()
        return {"rate": tokens / seconds, "seconds": seconds, "losses": losses, **peaks()}

    return attempt(run) | {"environment": environment()}


def load(out: Path) -> dict[str, Any]:
    """The rows so far."""
    path = out / "offload.json"
    empty = {"schema": 1, "job": f"{MODEL}, {BATCH} × {SEQ}, bf16", "rows": {}}
    return json.loads(path.read_text()) if path.exists() else empty


def put(out: Path, name: str, cell: dict[str, Any]) -> None:
    """Write a row's cell beside the others."""
    document = load(out)
    document["rows"][name] = cell
    out.mkdir(parents=True, exist_ok=True)
    whole = out / "offload.json.new"
    whole.write_text(json.dumps(document, indent=1) + "\n")
    whole.replace(out / "offload.json")
    print(f"{name}: {_rate(cell)} {cell.get('error', '')[-300:]}", flush=True)


def run_missing(rows: Sequence[Row], out: Path) -> None:
    """Run what is not there yet, one after the other."""
    for row in rows:
        known = load(out)["rows"].get(row.name, {"status": NOT_INSTALLED})
        if known["status"] != NOT_INSTALLED:
            continue
        if not row.is_installed:
            put(out, row.name, {"status": NOT_INSTALLED})
            continue
        command = [sys.executable, "-m", "benchmarks.offload", "--out", str(out), "--row", row.name]
        try:
            code = subprocess.run(command, timeout=PATIENCE_S, check=False).returncode
            ended = f"the process ended with {code}"
        except subprocess.TimeoutExpired:
            ended = f"not done in {PATIENCE_S} s"
        if row.name not in load(out)["rows"]:
            put(out, row.name, {"status": "failed", "error": ended})


def render(document: Mapping[str, Any]) -> str:
    """The table as markdown."""
    lines = [
        f"{document['job']}, clipped to {CLIP_NORM}",
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
    """Run all rows, or one of them, or print what was run."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(prog="benchmarks.offload", description=__doc__)
    parser.add_argument("--out", type=Path, help="the folder for results")
    parser.add_argument("--row", help="run this row in this process")
    parser.add_argument("--only", choices=["oomph", "peers"])
    parser.add_argument("--table", type=Path, help="print this file and run nothing")
    options = parser.parse_args(arguments)
    if options.table:
        print(render(json.loads(options.table.read_text())))
        return
    if options.out is None:
        parser.error("give --out")
    rows = [
        *(oomph_rows(options.out) if options.only != "peers" else ()),
        *(PEERS if options.only != "oomph" else ()),
    ]
    if options.row:
        row = next((row for row in rows if row.name == options.row), None)
        if row is None:
            parser.error(f"rows are {'; '.join(row.name for row in rows)}")
        put(options.out, row.name, run_row(row))
        return
    run_missing(rows, options.out)
    print(render(load(options.out)))


if __name__ == "__main__":
    main()
