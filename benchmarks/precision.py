"""What adaptive precision buys and costs: `python -m benchmarks.precision --out OUT [--device D]`.

Trains small transformers on modular addition to convergence, over three seeds: in fp32, in bf16
throughout, and adaptively from fp32 on, with the default thresholds and with wider ones. One of the
models has a layer that is sensitive on purpose: all numbers go through a product far from zero,
where bf16 keeps little of them. Prints final loss and accuracy, computed in fp32, with their
spread; the seconds of the training as measured; and the memory and seconds of a large step at the
final levels, as rehearsed for a card. On a GPU the memory is measured, too. Writes `precision.json`
into OUT.

The CPU has no fast bf16 in most machines: what a lower level takes there says nothing of a card.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oomph.hardware import GPU, find_gpu
from oomph.jobs.job import Job
from oomph.plans.precisions import Precision
from oomph.precision.controller import AdaptivePrecision
from oomph.precision.report import PredictedStep, predict_step
from oomph.runs.run import fit
from oomph.techniques.number_formats import Level
from oomph.units import format_bytes

#: Numbers are added modulo this.
MODULUS = 23
WIDTH, HEADS, BLOCKS = 64, 4, 2
STEPS, SEEDS = 250, 3
#: How far from zero the sensitive layer multiplies.
FAR = 500.0
#: Pairs of numbers in the step that is rehearsed.
REHEARSED = 1 << 18
BUDGET = 4 << 30

Batch = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Every number looks at the other."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5).softmax(-1)
        mixed: Tensor = self.out((weights @ v).transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        out: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return out


class FarFromZero(nn.Module):
    """A plain product, computed of numbers to which a large one was added."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        far = torch.full_like(x[:1, :1], FAR)
        product: Tensor = self.linear(x + far) - self.linear(far)
        return product


class Adder(nn.Module):
    """Says what two numbers add up to."""

    def __init__(self, sensitive: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(MODULUS, WIDTH)
        self.place = nn.Parameter(torch.randn(2, WIDTH) * 0.1)
        self.entry = FarFromZero() if sensitive else nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, MODULUS)

    def forward(self, pairs: Tensor) -> Tensor:
        x = self.blocks(self.entry(self.embed(pairs) + self.place))
        sums: Tensor = self.head(self.norm(x[:, -1]))
        return sums


def all_pairs(device: str) -> Batch:
    """Every pair there is, and what it adds up to."""
    pairs = torch.cartesian_prod(torch.arange(MODULUS), torch.arange(MODULUS)).to(device)
    return pairs, pairs.sum(1) % MODULUS


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to train."""

    name: str
    precision: Precision
    adaptive: AdaptivePrecision | None = None


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One training."""

    loss: float
    accuracy: float
    seconds: float
    probing: float
    """The part of the seconds that went into probes."""
    levels: dict[str, Level]
    events: list[str]
    allocated: int | None
    """The most memory, where a GPU counts it."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """All trainings of one model in one way."""

    model: str
    way: str
    trained: list[Trained]
    step: PredictedStep


def train(model: str, way: Way, seed: int, *, device: str, steps: int) -> Trained:
    """Train one model in one way."""
    torch.manual_seed(seed)
    net = build(model)().to(device)
    batch = all_pairs(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.0)
    # Exact: with any other plan the ways would differ in more than what they are called.
    run = fit(
        net,
        optimizer,
        nn.CrossEntropyLoss(),
        batch,
        budget=BUDGET,
        allow="exact",
        precision=way.precision,
    )
    precision = run.adapt_precision(way.adaptive) if way.adaptive is not None else None
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for _ in range(steps):
        loss = run.step(batch)
    loss.item()
    seconds = time.perf_counter() - started
    measured = run.measured()
    run.undo()
    final, accuracy = judge(net, batch)
    return Trained(
        loss=final,
        accuracy=accuracy,
        seconds=seconds,
        probing=precision.report().probing if precision is not None else 0.0,
        levels=precision.levels if precision is not None else {},
        events=list(map(str, precision.events)) if precision is not None else [],
        allocated=measured.allocated if measured is not None else None,
    )


def build(model: str) -> Callable[[], Adder]:
    """A function that builds the model of this name."""
    return lambda: Adder(sensitive=model == "sensitive")


@torch.no_grad()
def judge(net: nn.Module, batch: Batch) -> tuple[float, float]:
    """Loss and accuracy over all pairs, computed in fp32."""
    logits = net(batch[0])
    right = logits.argmax(1) == batch[1]
    return float(F.cross_entropy(logits, batch[1])), float(right.float().mean())


def rehearsed(model: str, way: Way, trained: Sequence[Trained], gpu: GPU) -> PredictedStep:
    """A large step of the first seed's final levels on the card."""
    pairs = torch.zeros(REHEARSED, 2, dtype=torch.long)
    batch = (pairs, pairs[:, 0].clone())
    job = Job(build(model), nn.CrossEntropyLoss(), "adamw-fused", batch, precision=way.precision)
    return predict_step(job, trained[0].levels, gpu)


def ways(steps: int) -> list[Way]:
    """Those that are compared."""
    adaptive = AdaptivePrecision(every=max(1, steps // 25), patience=2)
    wider = dataclasses.replace(adaptive, demote_below=0.4, promote_above=0.8)
    return [
        Way(name="fp32", precision="fp32"),
        Way(name="bf16", precision="bf16-mixed"),
        Way(name="adaptive", precision="fp32", adaptive=adaptive),
        Way(name="adaptive, wider thresholds", precision="fp32", adaptive=wider),
    ]


def spread(values: Sequence[float], pattern: str) -> str:
    """The middle one and both ends."""
    shown = [format(value, pattern) for value in (min(values), max(values))]
    return f"{statistics.median(values):{pattern}} ({shown[0]}–{shown[1]})"


def levels_in_words(trained: Trained) -> str:
    """How many layers are at which level in the end."""
    counts = Counter(trained.levels.values())
    return ", ".join(f"{counts[level]} {level}" for level in Level if counts[level])


def main() -> None:
    """Train all, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gpu", default="h100-sxm", help="the card to rehearse for")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    options = parser.parse_args()
    gpu = find_gpu(options.gpu)
    rows = []
    for model in ("plain", "sensitive"):
        for way in ways(options.steps):
            trained = [
                train(model, way, seed, device=options.device, steps=options.steps)
                for seed in range(options.seeds)
            ]
            step = rehearsed(model, way, trained, gpu)
            rows.append(Row(model=model, way=way.name, trained=trained, step=step))
            print(f"{model}, {way.name}: done")
    print_table(rows, options)
    write(rows, options)


def print_table(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Medians over the seeds, with both ends; levels and what is predicted are the first seed's."""
    head = [
        "model",
        "way",
        "final loss",
        "accuracy",
        f"s ({options.device}, measured)",
        "in probes",
        f"memory ({options.device}, measured)",
        f"memory ({options.gpu}, predicted)",
        f"ms a step ({options.gpu}, predicted)",
        "levels in the end",
    ]
    lines = [head, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"{REHEARSED:,} pairs in what is predicted, {MODULUS**2} in what is measured")
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def _cells(row: Row) -> list[str]:
    trained = row.trained
    measured = [one.allocated for one in trained if one.allocated is not None]
    return [
        row.model,
        row.way,
        spread([one.loss for one in trained], ".2e"),
        spread([one.accuracy for one in trained], ".1%"),
        spread([one.seconds for one in trained], ".1f"),
        f"{statistics.median(one.probing for one in trained):.0%}",
        format_bytes(max(measured)) if measured else "–",
        format_bytes(row.step.peak),
        f"{1000 * row.step.seconds:.2f}",
        levels_in_words(trained[0]) or f"all {row.way}",
    ]


def write(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """All numbers, as JSON."""
    options.out.mkdir(parents=True, exist_ok=True)
    content = {
        "kind": "oomph precision benchmark",
        "schema_version": 1,
        "torch": torch.__version__,
        "device": options.device,
        "predicted_for": options.gpu,
        "steps": options.steps,
        "rows": rows,
    }
    text = json.dumps(content, default=dataclasses.asdict, indent=1)
    (options.out / "precision.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
