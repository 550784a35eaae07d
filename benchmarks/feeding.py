"""Ragged data three ways: `python -m benchmarks.feeding --out OUT [--small]`.

Trains a small Llama on samples of skewed lengths in batches of a fixed size, padded to their
longest; in batches by tokens; and in packed rows. All have the largest size that is predicted to
fit one budget, which is enforced. Prints real tokens (those of samples, without padding) a second,
and the loss per token: that of the same untrained weights over the same samples, summed over all
learned tokens and divided by their number, so that only the way of batching differs.

Then a loader that alone would be twice as fast as the step feeds it, with and without prefetching:
how much of the time does the GPU wait? Writes `feeding.json` into OUT. `--small` runs on the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.real_steps import fill_weights
from oomph.data.loader import Loader
from oomph.data.packed_rows import PackedDataset, check_packing, pack_row
from oomph.data.packing import PackedBatches
from oomph.data.padding import pad_samples
from oomph.data.prefetch import Prefetcher
from oomph.data.samples import IGNORED
from oomph.data.token_batches import TokenBatches
from oomph.data.token_limit import tokens_that_fit
from oomph.data.waiting import make_waiting
from oomph.errors import BadInput
from oomph.estimation import Estimate, estimate
from oomph.gpus import find_gpu
from oomph.job import Job, make_optimizer
from oomph.running.run import enforce
from oomph.techniques.allocator_settings import EXPANDABLE, set_allocator
from oomph.techniques.autocast import autocast
from oomph.units import GIB, MIB, format_bytes, parse_bytes

#: Steps that warm up, and count for nothing.
WARM_UP = 3
#: How far apart losses per token may be that differ by the order of sums and by rounding alone.
TOLERANCE = {"cuda": 2e-3, "cpu": 1e-5}
PREFETCH = 2
#: Phases whose memory decides; the run neither evaluates nor saves.
PHASES = ("build", "first step", "step")

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, on how many samples of which lengths, for how long."""

    device: str
    budget: int
    hidden: int
    layers: int
    vocabulary: int
    shortest: int
    typical: int
    longest: int
    samples: int
    steps: int
    compared: int
    """Samples over which losses are compared."""

    @property
    def precision(self) -> Any:
        return "bf16-mixed" if self.device == "cuda" else "fp32"

    @property
    def optimizer(self) -> str:
        return "adamw-fused" if self.device == "cuda" else "adamw"


ON_A_CARD = Setting(
    device="cuda",
    budget=24 * GIB,
    hidden=1024,
    layers=16,
    vocabulary=32_000,
    shortest=16,
    typical=160,
    longest=2048,
    samples=20_000,
    steps=40,
    compared=256,
)
SMALL = Setting(
    device="cpu",
    budget=16 * MIB,
    hidden=32,
    layers=2,
    vocabulary=128,
    shortest=4,
    typical=16,
    longest=128,
    samples=400,
    steps=6,
    compared=40,
)


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to make batches of samples."""

    name: str
    open: Callable[[Sequence[int]], Iterable[Batch]]
    """A pass over the samples with these numbers."""
    worst: tuple[int, int]
    predicted: Estimate
    padding: float


def make_lengths(setting: Setting) -> list[int]:
    """Many short samples and few long ones."""
    drawn = np.random.default_rng(0).lognormal(np.log(setting.typical), 1.0, setting.samples)
    lengths = drawn.astype(int).clip(setting.shortest, setting.longest)
    lengths[0] = setting.longest
    return [int(length) for length in lengths]


def make_dataset(setting: Setting, lengths: Sequence[int]) -> list[Tensor]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(setting.vocabulary, (n,), generator=generator) for n in lengths]


def make_model(setting: Setting) -> nn.Module:
    """A Llama that attends as transformers does by default."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=setting.hidden,
        intermediate_size=3 * setting.hidden,
        num_hidden_layers=setting.layers,
        num_attention_heads=max(setting.hidden // 64, 1),
        num_key_value_heads=max(setting.hidden // 64, 1),
        vocab_size=setting.vocabulary,
        max_position_embeddings=setting.longest,
        use_cache=False,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def make_job(setting: Setting, batch: Batch) -> Job:
    return Job(
        functools.partial(make_model, setting),
        None,
        setting.optimizer,
        batch,
        precision=setting.precision,
    )


def padded_job(setting: Setting, rows: int, length: int) -> Job:
    """The longest sample among shorter ones, so that attention needs its mask."""
    samples = [torch.ones(length if not row else -(-length // 2)) for row in range(rows)]
    return make_job(setting, pad_samples([sample.long() for sample in samples]))


def packed_job(setting: Setting, rows: int, length: int) -> Job:
    half = torch.ones(length // 2).long()
    row = pack_row([half, half], length=length)
    return make_job(setting, {name: torch.stack([value] * rows) for name, value in row.items()})


def make_ways(setting: Setting, lengths: list[int], dataset: list[Tensor]) -> list[Way]:
    """Each with the largest batches that are predicted to fit."""
    gpu = find_gpu(torch.cuda.get_device_name()) if setting.device == "cuda" else None
    limit = tokens_that_fit(
        functools.partial(padded_job, setting),
        lengths,
        gpu=gpu,
        budget=setting.budget,
        prefetch=PREFETCH,
        phases=PHASES,
        allocator=EXPANDABLE,
    )
    size = limit.value // setting.longest
    rows, packed = size, limit.estimate
    while rows:
        job = packed_job(setting, rows, setting.longest)
        packed = estimate(job, gpu=gpu, budget=setting.budget, phases=PHASES, allocator=EXPANDABLE)
        if packed.fits:
            break
        rows -= 1
    if not rows:
        raise BadInput(f"no packed row fits {format_bytes(setting.budget)}")

    def fixed(which: Sequence[int]) -> Iterable[Batch]:
        return DataLoader(
            [dataset[at] for at in which],  # type: ignore[arg-type]
            batch_size=size,
            shuffle=True,
            generator=torch.Generator().manual_seed(0),
            collate_fn=pad_samples,
        )

    def by_tokens(which: Sequence[int]) -> Iterable[Batch]:
        batches = TokenBatches([lengths[at] for at in which], tokens=limit.value)
        return Loader([dataset[at] for at in which], batches, collate=pad_samples)

    def in_rows(which: Sequence[int]) -> Iterable[Batch]:
        chosen = [dataset[at] for at in which]
        batches = PackedBatches([lengths[at] for at in which], length=setting.longest, rows=rows)
        return Loader(PackedDataset(chosen, length=setting.longest), batches)

    shuffled = np.random.default_rng(0).permutation(lengths)
    longest = [part.max() for part in np.array_split(shuffled, len(lengths) // size)]
    worst = size, setting.longest
    return [
        Way(
            name="fixed size, padded",
            open=fixed,
            worst=worst,
            predicted=limit.estimate,
            padding=1 - sum(lengths) / float(size * sum(longest)),
        ),
        Way(
            name="by tokens",
            open=by_tokens,
            worst=worst,
            predicted=limit.estimate,
            padding=TokenBatches(lengths, tokens=limit.value).waste().padding,
        ),
        Way(
            name="packed rows",
            open=in_rows,
            worst=(rows, setting.longest),
            predicted=packed,
            padding=PackedBatches(lengths, length=setting.longest, rows=rows).waste().padding,
        ),
    ]


class Trainer:
    """A model and its optimizer on the device, always the same at the beginning."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.device = setting, torch.device(setting.device)
        torch.manual_seed(0)
        self.model = make_model(setting).to(self.device)
        fill_weights(self.model)
        self._optimizer = make_optimizer(setting.optimizer)(self.model.parameters())

    def step(self, batch: Batch) -> float:
        """One optimizer step; reading its loss waits for the device."""
        with self._autocast():
            loss = self.model(**batch).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    @torch.no_grad()
    def loss_per_token(self, batches: Iterable[Batch]) -> float:
        """Summed over all learned tokens and divided by their number."""
        total, learned = 0.0, 0
        for batch in self.on_device(batches):
            targets = batch["labels"][:, 1:].flatten()
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            with self._autocast():
                logits = self.model(**inputs).logits[:, :-1].flatten(0, 1)
            keep = targets != IGNORED  # fp32 logits of padding would take the budget
            losses = F.cross_entropy(logits[keep].float(), targets[keep], reduction="sum")
            total += float(losses)
            learned += int(keep.sum())
        return total / learned

    def on_device(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            yield {name: value.to(self.device) for name, value in batch.items()}

    def _autocast(self) -> Any:
        return autocast(self.setting.precision, self.setting.device)


def real_tokens(batch: Batch) -> int:
    """Tokens of samples: those behind which a token is learned, and one more for each sample."""
    if "attention_mask" in batch:
        return int(batch["attention_mask"].sum())
    learned = batch["labels"] != IGNORED
    begins = batch["position_ids"] == 0
    follows = torch.zeros_like(learned)
    follows[:, :-1] = learned[:, 1:]
    # A first token counts if it is a sample's: the padding's is followed by nothing learned.
    return int(learned.sum()) + int((begins & follows).sum())


def measure(setting: Setting, way: Way) -> dict[str, Any]:
    """Real tokens a second, memory and loss per token of one way."""
    trainer = Trainer(setting)
    everything = range(setting.samples)
    compared = list(range(setting.compared))
    loss = trainer.loss_per_token(way.open(compared))
    if setting.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds, tokens, computed = [], 0, 0
    with Prefetcher(_forever(way, everything), trainer.device, PREFETCH) as batches:
        began = time.perf_counter()
        for at, batch in enumerate(batches):
            trainer.step(batch)
            now = time.perf_counter()
            if at >= WARM_UP:
                seconds.append(now - began)
                tokens += real_tokens(batch)
                computed += batch["input_ids"].numel()
            began = time.perf_counter()
            if at + 1 == WARM_UP + setting.steps:
                break
        waited = sum(batches.waited[WARM_UP:])
    peak = torch.cuda.max_memory_reserved() if setting.device == "cuda" else None
    return {
        "name": way.name,
        "worst_shape": way.worst,
        "predicted_device_bytes": way.predicted.peak.device,
        "measured_reserved_bytes": peak,
        "padding_of_an_epoch": way.padding,
        "tokens_per_second": tokens / sum(seconds),
        "computed_per_second": computed / sum(seconds),
        "waited": waited / sum(seconds),
        "loss_per_token": loss,
        "step_seconds": seconds,
    }


def _forever(way: Way, which: Sequence[int]) -> Iterator[Batch]:
    while True:
        yield from way.open(which)


class Slow:
    """A loader that takes so many seconds for a batch."""

    def __init__(self, batches: list[Batch], seconds: float, count: int) -> None:
        self._batches, self._seconds, self._count = batches, seconds, count

    def __iter__(self) -> Iterator[Batch]:
        for at in range(self._count):
            time.sleep(self._seconds)
            yield self._batches[at % len(self._batches)]


def measure_waiting(setting: Setting, way: Way) -> dict[str, Any]:
    """How long the device waits for a loader that alone is twice as fast as the step."""
    trainer = Trainer(setting)
    pass_of = iter(way.open(range(setting.samples)))
    batches = [next(pass_of) for _ in range(4)]
    if "position_ids" in batches[0]:
        check_packing(trainer.model, dict(next(trainer.on_device(batches[:1]))))
    seconds = []
    for batch in trainer.on_device(batches * 2):
        began = time.perf_counter()
        trainer.step(batch)
        seconds.append(time.perf_counter() - began)
    step = float(np.median(seconds[WARM_UP:]))
    loader = Slow(batches, step / 2, WARM_UP + setting.steps)
    return {
        "step_seconds": step,
        "loader_seconds": step / 2,
        "waited_without": _waited_without(trainer, loader),
        "waited_with": _waited_with(trainer, loader),
    }


def _waited_without(trainer: Trainer, loader: Iterable[Batch]) -> float:
    """The part of the time that a plain loop waits."""
    waiting, batches = make_waiting(trainer.device), trainer.on_device(loader)
    began = time.perf_counter()
    while True:
        waiting.begin()
        batch = next(batches, None)
        if batch is None:
            break
        waiting.end()
        trainer.step(batch)
        if len(waiting.seconds()) == WARM_UP:
            began = time.perf_counter()
    return sum(waiting.seconds()[WARM_UP:]) / (time.perf_counter() - began)


def _waited_with(trainer: Trainer, loader: Iterable[Batch]) -> float:
    with Prefetcher(loader, trainer.device, PREFETCH) as batches:
        began = time.perf_counter()
        for at, batch in enumerate(batches, start=1):
            trainer.step(batch)
            if at == WARM_UP:
                began = time.perf_counter()
        return sum(batches.waited[WARM_UP:]) / (time.perf_counter() - began)


def compare(
    setting: Setting, ways: list[dict[str, Any]], waiting: dict[str, Any]
) -> dict[str, Any]:
    """The ways beside the first one."""
    base = ways[0]
    apart = max(abs(way["loss_per_token"] / base["loss_per_token"] - 1) for way in ways)
    return {
        "setting": dataclasses.asdict(setting),
        "ways": [
            {**way, "speed_up": way["tokens_per_second"] / base["tokens_per_second"]}
            for way in ways
        ],
        "losses_apart": apart,
        "losses_equal": apart <= TOLERANCE[setting.device],
        "waiting": waiting,
    }


def describe(result: dict[str, Any]) -> str:
    """A table; all numbers but `predicted` were measured."""
    setting = result["setting"]
    lines = [
        f"lengths {setting['shortest']}–{setting['longest']}, budget"
        f" {format_bytes(setting['budget'])}",
        f"{'batches':<20}{'worst':>10}{'padding':>9}{'tokens/s':>11}{'×':>6}{'predicted':>12}"
        f"{'reserved':>12}{'loss/token':>12}",
    ]
    for way in result["ways"]:
        rows, length = way["worst_shape"]
        reserved = way["measured_reserved_bytes"]
        lines.append(
            f"{way['name']:<20}{f'{rows}×{length}':>10}{way['padding_of_an_epoch']:>9.1%}"
            f"{way['tokens_per_second']:>11,.0f}{way['speed_up']:>6.2f}"
            f"{format_bytes(way['predicted_device_bytes']):>12}"
            f"{format_bytes(reserved) if reserved is not None else '–':>12}"
            f"{way['loss_per_token']:>12.5f}"
        )
    words = "equal" if result["losses_equal"] else "NOT equal"
    waiting = result["waiting"]
    lines += [
        f"losses per token are {words}: at most {result['losses_apart']:.1e} apart",
        f"a loader of {waiting['loader_seconds'] * 1000:.1f} ms a batch and a step of"
        f" {waiting['step_seconds'] * 1000:.1f} ms: the device waits"
        f" {waiting['waited_without']:.1%} of the time without prefetching and"
        f" {waiting['waited_with']:.1%} with it",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every way, print the comparison, write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="a smoke test on the CPU")
    parser.add_argument("--budget", type=parse_bytes)
    parser.add_argument("--steps", type=int)
    given = parser.parse_args(arguments)
    setting = SMALL if given.small else ON_A_CARD
    asked = {"budget": given.budget, "steps": given.steps}
    changes: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    setting = dataclasses.replace(setting, **changes)
    if setting.device == "cuda":
        set_allocator(EXPANDABLE)  # batches of many shapes would leave gaps
        card = find_gpu(torch.cuda.get_device_name())
        enforce(setting.budget, card, torch.device("cuda", torch.cuda.current_device()))
    lengths = make_lengths(setting)
    ways = make_ways(setting, lengths, make_dataset(setting, lengths))
    measured = [measure(setting, way) for way in ways]
    result = compare(setting, measured, measure_waiting(setting, ways[-1]))
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "feeding.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(describe(result))


if __name__ == "__main__":
    main()
