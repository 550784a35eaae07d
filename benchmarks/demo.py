"""What oomph does, in about a minute and with no GPU: `make demo`.

First a large model on a consumer card: will it fit, and a plan that makes it fit. Then small models
are really trained on the CPU: what was predicted stands beside what PyTorch's own profiler
measured, and one is trained inside half of the memory it would take, with the losses it would have
had.
"""

from __future__ import annotations

import copy
import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when transformers is imported

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor, nn

import oomph
from benchmarks.profiler_memory import measure_cpu_peak
from oomph.engine.step import Stage, train_step
from oomph.jobs.job import build_model, make_batch, make_optimizer
from oomph.report.plans import describe_plan
from oomph.report.report import Report, Table, describe
from oomph.report.text import print_estimate, print_report, print_table
from oomph.units import format_bytes

GPU = "rtx-4090"
COMPARED_STEPS = 4
STEPS = 2  # the second is the one that counts: optimizer state exists from then on


def main() -> None:
    """Run the demo."""
    console = Console()
    large = oomph.job_from_name("llama-3.1-8b", batch=1, seq=2048, precision="bf16-mixed")
    print_estimate(oomph.estimate(large, gpu=GPU), console)

    _title("A model of 1.2 B parameters on the same card: what makes it fit", console)
    smaller = oomph.job_from_name("llama-3.2-1b", batch=8, seq=2048, precision="bf16-mixed")
    console.print(_first_line(describe(oomph.estimate(smaller, gpu=GPU))), soft_wrap=True)
    print_report(describe_plan(oomph.plan(smaller, gpu=GPU)), console)

    _title("A small GPT-2, really trained on this CPU: predicted and measured", console)
    _compare_with_the_profiler(console)

    _title("The same, trained inside half of the memory", console)
    _train_in_half_the_memory(console)


def _first_line(report: Report) -> str:
    return f"{report.verdict}: {report.headline}"


def _train_in_half_the_memory(console: Console) -> None:
    """Plan for half of the natural peak, train both ways, and print both."""
    torch.manual_seed(0)
    model = _small_gpt2()
    untouched = copy.deepcopy(model)
    batch = _small_batch()
    phases = ("build", "first step", "step")
    job = oomph.Job(model, None, torch.optim.AdamW(model.parameters()), batch)
    natural = oomph.estimate(job, phases=phases).peak.allocated
    assert isinstance(job.optimizer, torch.optim.Optimizer)
    run = oomph.fit(model, job.optimizer, None, batch, budget=natural // 2)
    console.print(_first_line(describe_plan(run.plan)), soft_wrap=True, highlight=False)

    planned: list[float] = []
    # The weights and the batch are there before the profiler looks.
    before = sum(t.nbytes for t in (*model.parameters(), *batch.values()))
    measured = before + measure_cpu_peak(
        lambda: planned.extend(run.step(batch).item() for _ in range(COMPARED_STEPS))
    )
    plain = oomph.Job(untouched, None, torch.optim.AdamW(untouched.parameters()), batch)
    losses = _losses(plain, COMPARED_STEPS)
    print_table(
        Table(
            title=f"Peak of tensor memory, natural {format_bytes(natural)}",
            header=("", "predicted", "measured", "budget"),
            rows=(
                (
                    "planned",
                    format_bytes(run.plan.predicted.peak.allocated),
                    format_bytes(measured),
                    format_bytes(run.plan.budget),
                ),
            ),
        ),
        console,
    )
    print_table(
        Table(
            title="Losses",
            header=("step", "planned", "untouched", "difference"),
            rows=tuple(
                (str(at + 1), f"{one:.6f}", f"{other:.6f}", f"{one - other:+.1e}")
                for at, (one, other) in enumerate(zip(planned, losses, strict=True))
            ),
        ),
        console,
    )
    run.undo()


def _losses(job: oomph.Job, steps: int) -> list[float]:
    """The losses of a job that oomph does not touch."""
    model, optimizer = job.model, job.optimizer
    assert isinstance(model, nn.Module) and isinstance(optimizer, torch.optim.Optimizer)
    losses = []
    for _ in range(steps):
        loss = model(**job.batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _compare_with_the_profiler(console: Console) -> None:
    """Predict the peak of tensor memory of some jobs, run them, and print both."""
    rows = []
    for how, job in _small_jobs().items():
        predicted = oomph.estimate(job, phases=("build", "first step", "step")).peak.allocated
        measured = measure_cpu_peak(lambda job=job: _train(job))  # type: ignore[misc]
        off = predicted - measured
        rows.append(
            (
                how,
                format_bytes(predicted),
                format_bytes(measured),
                f"{off:+,} B",
                f"{100 * off / measured:+.5f} %",
            )
        )
    table = Table(
        title=f"Peak of tensor memory over {STEPS} steps",
        header=("job", "predicted", "measured", "difference", "of measured"),
        rows=tuple(rows),
    )
    print_table(table, console)
    console.print(
        "Measured by torch.profiler's memory events, not by oomph. What is left: numbers of 8 B"
        " that CPU kernels wrap as tensors, and under checkpointing the random state kept for each"
        " block (5,056 B). Scratch memory that CPU kernels take would show here too.",
        highlight=False,
    )


def _small_jobs() -> dict[str, oomph.Job]:
    return {
        "plain": oomph.Job(_small_gpt2, batch=_small_batch),
        "two micro-batches": oomph.Job(_small_gpt2, batch=_small_batch, micro_batch=4),
        "full checkpointing": oomph.Job(_small_gpt2, batch=_small_batch, checkpointing="full"),
    }


def _small_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=4,
        n_embd=256,
        n_head=8,
        vocab_size=8192,
        n_positions=128,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        # Micro-batches would draw other random numbers than the whole batch.
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def _small_batch() -> dict[str, Tensor]:
    tokens = torch.arange(8 * 128).reshape(8, 128)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _train(job: oomph.Job) -> None:
    """Build the job's model and train it with the very step that is rehearsed (rule 1)."""
    assert isinstance(job.optimizer, str)
    model, batch = build_model(job), make_batch(job)
    optimizer = make_optimizer(job.optimizer)(model.parameters())
    stage = Stage(job=job, model=model, optimizer=optimizer, device_type="cpu")
    for _ in range(STEPS):
        train_step(stage, batch)


def _title(words: str, console: Console) -> None:
    console.print()
    console.print(Text(words, style="bold underline"))


if __name__ == "__main__":
    main()
