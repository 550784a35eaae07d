"""What oomph does, in under a minute and with no GPU: `make demo`.

First two estimates for a consumer card; then a small model is really trained on the CPU, and what
was predicted stands beside what PyTorch's own profiler measured.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when transformers is imported

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor, nn

import oomph
from benchmarks.profiler_memory import measure_cpu_peak
from oomph.job import build_model, make_batch, make_optimizer
from oomph.reporting.report import Table, describe
from oomph.reporting.text import print_estimate, print_table
from oomph.running.step import Stage, train_step
from oomph.units import format_bytes

GPU = "rtx-4090"
STEPS = 2  # the second is the one that counts: optimizer state exists from then on


def main() -> None:
    """Run the demo."""
    console = Console()
    large = oomph.job_from_name("llama-3.1-8b", batch=1, seq=2048, precision="bf16-mixed")
    print_estimate(oomph.estimate(large, gpu=GPU), console)

    _title("A smaller model on the same card, with checkpointing and a fused optimizer", console)
    small = oomph.job_from_name(
        "llama-3.2-1b",
        batch=1,
        seq=2048,
        precision="bf16-mixed",
        optimizer="adamw-fused",
        checkpointing="full",
    )
    report = describe(oomph.estimate(small, gpu=GPU))
    console.print(f"{report.verdict}: {report.headline}", soft_wrap=True, highlight=False)

    _title("A small GPT-2, really trained on this CPU: predicted and measured", console)
    _compare_with_the_profiler(console)


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
