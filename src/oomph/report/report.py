"""Describe an estimate as sentences and tables, independent of the output format."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oomph.hardware import GPU, known_gpus
from oomph.units import format_bytes

if TYPE_CHECKING:
    from oomph.rehearsal.estimation import Estimate

VERDICT_WORDS = {"fits": "fits", "does_not_fit": "does not fit", "inconclusive": "inconclusive"}
LEDGER_WORDS = {
    "allocated": "handed out by PyTorch",
    "reserved": "taken from the driver by its allocator",
    "device": "what nvidia-smi shows",
}
MOST_MODULES = 8
MOST_GPUS = 3

# Each category's phrase in a sentence, and why it is alive at the peak.
_CATEGORIES = {
    "parameter": ("parameters hold", "the model's weights"),
    "buffer": ("buffers hold", "the model's state without gradients"),
    "gradient": ("gradients waiting for the optimizer hold", "kept until the optimizer ran"),
    "optimizer state": ("optimizer state holds", "kept from step to step"),
    "input": ("inputs hold", "the batch"),
    "activation": ("activations saved for backward hold", "saved by forward for backward"),
    "temporary": ("temporaries hold", "results in use at this moment"),
    "workspace": ("workspaces hold", "scratch memory of cuBLAS and cuDNN"),
}


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under a title. The first column is text, the others are numbers by default."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text: tuple[str, ...] = ()
    """Further columns that are text, by their header."""

    def is_text(self, column: int) -> bool:
        """Whether a column is left-aligned text."""
        return column == 0 or self.header[column] in self.text


@dataclass(frozen=True, kw_only=True)
class Report:
    """The contents of a report on an estimate or an answer, in the order they are printed."""

    verdict: str
    headline: str
    """The answer without its verdict."""
    advice: tuple[str, ...]
    """What would make the job fit, if it does not."""
    tables: tuple[Table, ...]
    lists: tuple[tuple[str, tuple[str, ...]], ...]
    """Titles with their sentences: assumptions, and reasons for the interval's width."""
    seconds: float
    """How long the prediction took."""


def describe(estimate: Estimate) -> Report:
    """The full report on an estimate."""
    lists = [
        ("Notes", estimate.notes),
        ("Why the interval is this wide", estimate.interval_reasons),
    ]
    return Report(
        verdict=VERDICT_WORDS[estimate.verdict],
        headline=f"{describe_need(estimate)}; {_alive(estimate)}",
        advice=tuple(_advice(estimate)),
        tables=(
            _ledgers(estimate),
            _categories(estimate),
            _phases(estimate),
            _modules(estimate),
        ),
        lists=tuple((title, sentences) for title, sentences in lists if sentences),
        seconds=estimate.seconds,
    )


def describe_need(estimate: Estimate) -> str:
    """The memory needed and available: "gpt2 needs 15.4 GiB (… predicted) of t4's 15.6 GiB"."""
    device, interval = estimate.peak.device, estimate.interval["device"]
    need = f"{estimate.job} needs {format_bytes(device)}"
    if (interval.low, interval.high) != (device, device):
        need += f" ({format_range(interval.low, interval.high)} predicted)"
    else:
        need += " (predicted)"
    if estimate.budget is None:
        return f"{need} of tensors on the CPU; no budget was given"
    return f"{need} of {_budget(estimate)}"


def _budget(estimate: Estimate) -> str:
    assert estimate.budget is not None
    size = format_bytes(estimate.budget)
    card = known_gpus().get(estimate.gpu or "")
    if card is not None and card.memory == estimate.budget:
        return f"{card.name}'s {size}"
    return f"a budget of {size} on {estimate.gpu or 'the CPU'}"


def _alive(estimate: Estimate) -> str:
    """Where the peak is, and the categories that hold at least a tenth of it."""
    total = sum(estimate.categories_at_peak.values())
    large = [(n, s) for n, s in estimate.categories_at_peak.items() if s >= total / 10]
    held = [f"{_CATEGORIES[name][0]} {format_bytes(size)}" for name, size in large]
    # Keep only the first verb: "parameters hold 5 GiB, gradients 5 GiB".
    held[1:] = [re.sub(r" holds? ", " ", part) for part in held[1:]]
    return f"at the peak, {_place(estimate)}, {_sentence_list(held)}"


def _place(estimate: Estimate) -> str:
    at = estimate.peak_at
    phase = f"in the {at.phase}" if at.phase.endswith("step") else f"in {at.phase or 'build'}"
    op = short_op(at.op)
    if at.op.startswith(("aten._foreach_", "aten._fused_")):
        return f"{phase}'s optimizer ({op})"
    where = f" at {at.module}" if at.module else ""
    if "_backward" in at.op:
        return f"{phase}'s backward{where} ({op})"
    return f"{phase}{where} ({op})" if op else f"{phase}{where}"


def _advice(estimate: Estimate) -> Iterable[str]:
    budget = estimate.budget
    yield from estimate.warnings
    if budget is None or (estimate.warnings and estimate.verdict == "inconclusive"):
        return
    if estimate.verdict == "fits":
        if estimate.allocator_retries:
            yield (
                f"It fits because the allocator gives cached blocks back"
                f" {estimate.allocator_retries} times on the way, which costs time."
            )
        return
    if estimate.verdict == "inconclusive":
        low, high = estimate.interval["device"].low, estimate.interval["device"].high
        yield f"The budget lies where it may or may not do: {format_range(low, high)} predicted."
    smallest = estimate.smallest_budget
    yield f"The smallest budget it would run in: {format_bytes(smallest)} (predicted)."
    if estimate.gpu is None:
        return
    gpus = smallest_gpus(smallest, estimate.gpu)
    if gpus:
        names = ", ".join(f"{gpu.name} ({format_bytes(gpu.memory)})" for gpu in gpus)
        yield f"The smallest GPUs that would hold it: {names}."
    else:
        yield "No single GPU of the catalogue would hold it."


def smallest_gpus(size: int, rehearsed: str) -> list[GPU]:
    """The smallest cards with at least `size` bytes, of the rehearsed card's vendor only, because
    allocator rules differ by vendor."""
    known = known_gpus()
    vendor = known[rehearsed].vendor if rehearsed in known else "nvidia"
    large = [gpu for gpu in known.values() if gpu.memory >= size and gpu.vendor == vendor]
    return sorted(large, key=lambda gpu: gpu.memory)[:MOST_GPUS]


def _ledgers(estimate: Estimate) -> Table:
    if estimate.gpu is None:
        words = "on the CPU, without what kernels take as scratch"
        rows = [("tensors", format_bytes(estimate.peak.allocated), "–", words)]
    else:
        rows = [
            (name, format_bytes(size), format_range(interval.low, interval.high), words)
            for name, size in estimate.peak.as_dict().items()
            for interval, words in [(estimate.interval[name], LEDGER_WORDS[name])]
        ]
        unused = "of reserved, in no use at its peak"
        rows.append(("fragmentation", f"{estimate.fragmentation:.0%}", "–", unused))
    return Table(
        title="Predicted peak",
        header=("ledger", "peak", "interval", "what it counts"),
        rows=tuple(rows),
        text=("what it counts",),
    )


def _categories(estimate: Estimate) -> Table:
    total = sum(estimate.categories_at_peak.values())
    return Table(
        title="Alive at the predicted peak, by category",
        header=("category", "size", "share", "why it is alive"),
        rows=tuple(
            (category, format_bytes(size), _share(size, total), _CATEGORIES[category][1])
            for category, size in estimate.categories_at_peak.items()
        ),
        text=("why it is alive",),
    )


def _phases(estimate: Estimate) -> Table:
    ledgers = ("allocated", "reserved", "device") if estimate.gpu is not None else ("allocated",)
    return Table(
        title="Predicted peak by phase",
        header=("phase", *(ledgers if len(ledgers) > 1 else ("tensors",))),
        rows=tuple(
            (name, *(format_bytes(getattr(peak, ledger)) for ledger in ledgers))
            for name, peak in estimate.phases.items()
        ),
    )


def _modules(estimate: Estimate) -> Table:
    total = sum(estimate.modules_at_peak.values())
    modules = list(estimate.modules_at_peak.items())
    rows = [(name, format_bytes(s), _share(s, total)) for name, s in modules[:MOST_MODULES]]
    rest = modules[MOST_MODULES:]
    if rest:
        size = sum(size for _, size in rest)
        rows.append((f"({len(rest)} more)", format_bytes(size), _share(size, total)))
    return Table(
        title="Alive at the predicted peak, by the module that made it",
        header=("module", "size", "share"),
        rows=tuple(rows),
    )


def format_range(low: int, high: int) -> str:
    """Format a range: `150.9–153.4 GiB`, with the unit once if both ends share it."""
    first, second = format_bytes(low), format_bytes(high)
    number, _, unit = first.rpartition(" ")
    return f"{number}–{second}" if second.endswith(f" {unit}") else f"{first} – {second}"


def short_op(op: str) -> str:
    """Shorten `aten._foreach_sqrt.default` to `_foreach_sqrt`."""
    return op.removeprefix("aten.").removesuffix(".default")


def _share(size: int, total: int) -> str:
    percent = 100 * size / total if total else 0.0
    return "<1 %" if 0 < percent < 1 else f"{percent:.0f} %"


def _sentence_list(parts: list[str]) -> str:
    return " and ".join((", ".join(parts[:-1]), parts[-1])) if len(parts) > 1 else "".join(parts)
