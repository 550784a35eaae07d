"""Ragged data three ways: `python -m benchmarks.feeding --out OUT [--small]`.

Trains a small Llama on samples of skewed lengths in batches of a fixed size, padded to their
longest; in batches by tokens; and in packed rows. The fixed size is the largest that is predicted
to fit a budget, which is enforced; the other two have no more tokens in a batch. Each way takes all
samples once, so that only the way of batching differs. Prints real tokens (those of samples,
without padding) a second, and the loss per token: that of the same untrained weights over the same
samples, summed over all learned tokens and divided by their number.

Then a loader that alone would be twice as fast as the step feeds it, with and without prefetching:
how much of the time does the GPU wait?

Writes `feeding.json` into OUT after each stage: a run that is killed loses only the one it was in.
`--small` runs on the CPU. `--only-sizes h200` predicts the sizes for that card, on any machine, and
writes `sizes.json`; with `--sizes FILE` the card is only measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import itertools
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

from benchmarks.plans import save
from benchmarks.real_steps import fill_weights
from oomph.data.loader import Loader
from oomph.data.packed_rows import PackedDataset, check_packing, pack_row
from oomph.data.packing import PackedBatches
from oomph.data.padding import pad_samples
from oomph.data.prefetch import Prefetcher
from oomph.data.prefetch_memory import prefetched_bytes
from oomph.data.samples import IGNORED
from oomph.data.token_batches import TokenBatches
from oomph.data.token_limit import tokens_that_fit
from oomph.data.waiting import make_waiting
from oomph.errors import BadInput
from oomph.hardware import GPU, find_gpu
from oomph.jobs.job import Job, make_optimizer
from oomph.rehearsal.estimation import estimate
from oomph.runs.run import enforce
from oomph.techniques.allocator_settings import EXPANDABLE, set_allocator
from oomph.techniques.autocast import autocast
from oomph.units import GIB, MIB, format_bytes, parse_bytes

#: Steps that warm up, and count for nothing.
WARM_UP = 3
#: Batches that the slow loader repeats.
REPEATED = 4
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
    compared: int
    """Samples over which losses are compared."""
    steps: int
    """With the slow loader."""

    @property
    def precision(self) -> Any:
        return "bf16-mixed" if self.device == "cuda" else "fp32"

    @property
    def optimizer(self) -> str:
        return "adamw-fused" if self.device == "cuda" else "adamw"


ON_A_CARD = Setting(
    device="cuda",
    budget=24 * GIB,
    hidden=1536,  # few wide layers: the card is busy with small batches, too
    layers=5,
    vocabulary=32_000,
    shortest=16,
    typical=160,
    longest=2048,
    samples=2_000,
    compared=256,
    steps=20,
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
    samples=200,
    compared=40,
    steps=6,
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The largest batches that are predicted to fit; each was rehearsed itself."""

    setting: Setting
    gpu: str | None
    torch: str
    rows: int
    """Samples of a padded batch; as many of the longest are the most tokens of any batch."""
    packed_rows: int
    padded_bytes: int
    """Predicted device memory of the largest padded batch."""
    packed_bytes: int
    rehearsals: int
    seconds: float

    @property
    def tokens(self) -> int:
        return self.rows * self.setting.longest


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to make batches of samples."""

    name: str
    open: Callable[[Sequence[int]], Iterable[Batch]]
    """A pass over the samples with these numbers."""
    rows: int
    """Of the largest batch, all as long as the longest sample."""
    worst: Batch
    """That batch, with made-up tokens."""
    predicted: int
    """Device memory with it, in bytes."""


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


def padded_batch(rows: int, length: int) -> Batch:
    """The longest sample among shorter ones, so that attention needs its mask."""
    samples = [torch.ones(length if not row else -(-length // 2)) for row in range(rows)]
    return pad_samples([sample.long() for sample in samples])


def packed_batch(rows: int, length: int) -> Batch:
    half = torch.ones(length // 2).long()
    row = pack_row([half, half], length=length)
    return {name: torch.stack([value] * rows) for name, value in row.items()}


def find_sizes(setting: Setting, gpu: GPU | None) -> Sizes:
    """Rehearse until they are known; needs no card."""
    began = time.perf_counter()
    limit = tokens_that_fit(
        lambda rows, length: make_job(setting, padded_batch(rows, length)),
        make_lengths(setting),
        gpu=gpu,
        budget=setting.budget,
        prefetch=PREFETCH,
        phases=PHASES,
        allocator=EXPANDABLE,
    )
    rows = limit.value // setting.longest
    for packed_rows in range(rows, 0, -1):
        batch = packed_batch(packed_rows, setting.longest)
        packed = estimate(
            make_job(setting, batch),
            gpu=gpu,
            budget=setting.budget - prefetched_bytes(batch, PREFETCH),
            phases=PHASES,
            allocator=EXPANDABLE,
        )
        if packed.fits:
            return Sizes(
                setting=setting,
                gpu=gpu.name if gpu is not None else None,
                torch=torch.__version__,
                rows=rows,
                packed_rows=packed_rows,
                padded_bytes=limit.estimate.peak.device,
                packed_bytes=packed.peak.device,
                rehearsals=limit.rehearsals + 1 + rows - packed_rows,
                seconds=time.perf_counter() - began,
            )
    raise BadInput(f"no packed row fits {format_bytes(setting.budget)}: raise --budget")


def read_sizes(path: Path, setting: Setting, gpu: GPU | None) -> Sizes:
    """Those of a file, if they were found for this setting and card."""
    found = json.loads(path.read_text(encoding="utf-8"))
    sizes = Sizes(**{**found, "setting": Setting(**found["setting"])})
    name = gpu.name if gpu is not None else None
    if sizes.setting != setting or sizes.gpu != name:
        raise BadInput(
            f"{path} holds the sizes of another setting or card ({sizes.gpu}, and this is {name}):"
            " write it again with --only-sizes"
        )
    return sizes


def make_ways(sizes: Sizes) -> list[Way]:
    """The three, over the same samples."""
    setting = sizes.setting
    lengths = make_lengths(setting)
    dataset = make_dataset(setting, lengths)

    def fixed(which: Sequence[int]) -> Iterable[Batch]:
        return DataLoader(
            [dataset[at] for at in which],  # type: ignore[arg-type]
            batch_size=sizes.rows,
            shuffle=True,
            generator=torch.Generator().manual_seed(0),
            collate_fn=pad_samples,
        )

    def by_tokens(which: Sequence[int]) -> Iterable[Batch]:
        batches = TokenBatches([lengths[at] for at in which], tokens=sizes.tokens)
        return Loader([dataset[at] for at in which], batches, collate=pad_samples)

    def in_rows(which: Sequence[int]) -> Iterable[Batch]:
        chosen = [dataset[at] for at in which]
        batches = PackedBatches(
            [lengths[at] for at in which], length=setting.longest, rows=sizes.packed_rows
        )
        return Loader(PackedDataset(chosen, length=setting.longest), batches)

    padded = functools.partial(
        Way,
        rows=sizes.rows,
        worst=padded_batch(sizes.rows, setting.longest),
        predicted=sizes.padded_bytes,
    )
    packed = Way(
        name="packed rows",
        open=in_rows,
        rows=sizes.packed_rows,
        worst=packed_batch(sizes.packed_rows, setting.longest),
        predicted=sizes.packed_bytes,
    )
    return [
        padded(name="fixed size, padded", open=fixed),
        padded(name="by tokens", open=by_tokens),
        packed,
    ]


class Trainer:
    """A model and its optimizer on the device, always the same at the beginning."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.device = setting, torch.device(setting.device)
        torch.manual_seed(0)
        with self.device:  # where numbers are drawn fastest
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
    free_memory()
    trainer = Trainer(setting)
    compared = range(setting.compared)
    loss = trainer.loss_per_token(way.open(compared))
    free_memory()
    # The largest batch takes all memory from the driver that the others will use; those of the
    # compared samples load kernels for shapes of their kind.
    for batch in trainer.on_device(itertools.chain([way.worst] * WARM_UP, way.open(compared))):
        trainer.step(batch)
    seconds, tokens, computed = list[float](), 0, 0
    began = time.perf_counter()
    with Prefetcher(way.open(range(setting.samples)), trainer.device, PREFETCH) as batches:
        for batch in batches:
            trainer.step(batch)
            seconds.append(time.perf_counter() - began)
            tokens += real_tokens(batch)
            computed += batch["input_ids"].numel()
            began = time.perf_counter()
        waited = sum(batches.waited)
    return {
        "name": way.name,
        "worst_shape": (way.rows, setting.longest),
        "predicted_device_bytes": way.predicted,
        **measured_memory(setting),
        "tokens": tokens,
        "padding": 1 - tokens / computed,
        "tokens_per_second": tokens / sum(seconds),
        "computed_per_second": computed / sum(seconds),
        "waited": waited / sum(seconds),
        "loss_per_token": loss,
        "step_seconds": seconds,
    }


def free_memory() -> None:
    """Models of earlier stages go, and their memory goes back: the budget is for one."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()


def measured_memory(setting: Setting) -> dict[str, int | None]:
    """The most since it was freed, and how often the allocator gave its cache back for more."""
    on_card = setting.device == "cuda"
    return {
        "measured_reserved_bytes": torch.cuda.max_memory_reserved() if on_card else None,
        "retries": torch.cuda.memory_stats()["num_alloc_retries"] if on_card else None,
    }


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
    free_memory()
    trainer = Trainer(setting)
    batches = list(itertools.islice(way.open(range(setting.samples)), REPEATED))
    if "position_ids" in batches[0]:
        row = {name: value[:1] for name, value in batches[0].items()}
        check_packing(trainer.model, next(trainer.on_device([row])))
    seconds = list[float]()
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
    sizes: Sizes, ways: list[dict[str, Any]], waiting: dict[str, Any] | None
) -> dict[str, Any]:
    """The ways measured so far beside the first one."""
    base = ways[0] if ways else {}
    apart = max(
        (abs(way["loss_per_token"] / base["loss_per_token"] - 1) for way in ways), default=0
    )
    return {
        "sizes": dataclasses.asdict(sizes),
        "ways": [
            {**way, "speed_up": way["tokens_per_second"] / base["tokens_per_second"]}
            for way in ways
        ],
        "losses_apart": apart,
        "losses_equal": apart <= TOLERANCE[sizes.setting.device],
        "waiting": waiting,
    }


def describe(result: dict[str, Any]) -> str:
    """A table; all numbers but `predicted` were measured."""
    setting = result["sizes"]["setting"]
    lines = [
        f"{setting['samples']:,} samples of {setting['shortest']}–{setting['longest']} tokens,"
        f" budget {format_bytes(setting['budget'])}",
        f"{'batches':<20}{'worst':>10}{'padding':>9}{'tokens/s':>11}{'×':>6}{'predicted':>12}"
        f"{'reserved':>12}{'loss/token':>12}",
    ]
    for way in result["ways"]:
        rows, length = way["worst_shape"]
        reserved = way["measured_reserved_bytes"]
        lines.append(
            f"{way['name']:<20}{f'{rows}×{length}':>10}{way['padding']:>9.1%}"
            f"{way['tokens_per_second']:>11,.0f}{way['speed_up']:>6.2f}"
            f"{format_bytes(way['predicted_device_bytes']):>12}"
            f"{format_bytes(reserved) if reserved is not None else '–':>12}"
            f"{way['loss_per_token']:>12.5f}"
        )
    words = "equal" if result["losses_equal"] else "NOT equal"
    lines.append(f"losses per token are {words}: at most {result['losses_apart']:.1e} apart")
    if (waiting := result["waiting"]) is not None:
        lines.append(
            f"a loader of {waiting['loader_seconds'] * 1000:.1f} ms a batch and a step of"
            f" {waiting['step_seconds'] * 1000:.1f} ms: the device waits"
            f" {waiting['waited_without']:.1%} of the time without prefetching and"
            f" {waiting['waited_with']:.1%} with it"
        )
    return "\n".join(lines)


def run(setting: Setting, gpu: GPU | None, out: Path, given_sizes: Path | None) -> dict[str, Any]:
    """Every stage, said when it begins and written down when it ends."""
    path, began = out / "feeding.json", time.perf_counter()

    def begin(stage: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s  {stage}", flush=True)

    if given_sizes is not None:
        sizes = read_sizes(given_sizes, setting, gpu)
    else:
        begin("the largest sizes that fit, by rehearsal")
        sizes = find_sizes(setting, gpu)
    ways, measured = make_ways(sizes), list[dict[str, Any]]()
    save(path, compare(sizes, measured, None))
    for way in ways:
        begin(f"{way.name}, at most {way.rows} × {setting.longest} tokens")
        measured.append(measure(setting, way))
        save(path, compare(sizes, measured, None))
    begin("a slow loader")
    result = compare(sizes, measured, measure_waiting(setting, ways[-1]))
    save(path, result)
    begin("done")
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every way, print the comparison, write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="a smoke test on the CPU")
    parser.add_argument("--budget", type=parse_bytes)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--sizes", type=Path, help="a file that --only-sizes wrote")
    sizes.add_argument("--only-sizes", metavar="GPU", help="for this card, as h200; needs none")
    given = parser.parse_args(arguments)
    setting = SMALL if given.small else ON_A_CARD
    if given.budget is not None:
        setting = dataclasses.replace(setting, budget=given.budget)
    if given.only_sizes:
        found = find_sizes(setting, find_gpu(given.only_sizes))
        save(given.out / "sizes.json", dataclasses.asdict(found))
        return
    gpu = None
    if setting.device == "cuda":
        set_allocator(EXPANDABLE)  # batches of many shapes would leave gaps
        gpu = find_gpu(torch.cuda.get_device_name())
        enforce(setting.budget, gpu, torch.device("cuda", torch.cuda.current_device()))
    print(describe(run(setting, gpu, given.out, given.sizes)))


if __name__ == "__main__":
    main()
