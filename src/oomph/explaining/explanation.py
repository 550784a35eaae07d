"""`oomph.explain(file)`: what a file about memory says, whatever tool wrote it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomph.errors import BadInput
from oomph.explaining.report_shapes import (
    EstimateShape,
    NoPlanShape,
    PlanShape,
    TrainingShape,
    WatchShape,
)
from oomph.explaining.snapshots import NO_STACK, Snapshot, read_snapshot
from oomph.explaining.traces import GZIP, KEY, Trace, read_trace
from oomph.files.plain_json import BadJson, parse_json
from oomph.files.reading import open_regular, read_regular
from oomph.files.schema import Mismatch, read_as
from oomph.quoting import brief
from oomph.rendering import Printed
from oomph.units import format_bytes

SCHEMA_VERSION = 1
#: Reports by oomph are far smaller.
LARGEST_JSON = 64 << 20
_PICKLE, _ZIP = b"\x80", b"PK\x03\x04"
#: Unused memory is mentioned above this share of what is reserved.
_MUCH_UNUSED = 0.2


@dataclass(frozen=True, kw_only=True)
class Explanation(Printed):
    """What a file says: the answer, and numbers by which two files can be compared."""

    source: str
    kind: str
    """`watch report`, `estimate`, `plan`, `training`, `snapshot` or `trace`."""
    headline: str
    """The answer in one line."""
    predicted: bool
    """Whether the numbers are predicted; otherwise they were measured."""
    ledgers: dict[str, int]
    """Peak bytes by ledger."""
    categories: dict[str, int]
    modules: dict[str, int]
    sites: dict[str, int]
    """Bytes by the line that allocated them."""
    advice: tuple[str, ...]
    details: dict[str, Any]
    """The file's own contents, as JSON."""

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON; these keys stay."""
        return {
            "kind": "oomph explanation",
            "schema_version": SCHEMA_VERSION,
            "source": self.source,
            "of": self.kind,
            "headline": self.headline,
            "predicted": self.predicted,
            "ledgers": self.ledgers,
            "categories": self.categories,
            "modules": self.modules,
            "sites": self.sites,
            "advice": list(self.advice),
            "details": self.details,
        }


def explain(path: str | Path) -> Explanation:
    """Explain a memory snapshot, a profiler trace or a JSON report by oomph.

    A snapshot is read without running anything in it; any other file is refused.
    """
    file = Path(path)
    try:
        with open_regular(file) as opened:
            start = opened.read(1 << 20)
            size = os.fstat(opened.fileno()).st_size
    except OSError as error:
        raise BadInput(f"cannot read {str(file)!r}: {error.strerror}") from None
    if not start:
        raise BadInput(f"{file} is empty")
    if start.startswith(_PICKLE):
        return explain_snapshot(read_snapshot(file), str(file))
    if start.startswith(_ZIP):
        raise BadInput(f"{file} is an archive, as torch.save writes it, not a memory snapshot")
    if start.startswith(GZIP) or KEY in start:
        return explain_trace(read_trace(file), str(file))
    if start.lstrip()[:1] != b"{":
        raise BadInput(
            f"{file} is neither a memory snapshot, nor a profiler trace, nor a report of oomph"
        )
    if size > LARGEST_JSON:
        raise BadInput(f"{file} has {format_bytes(size)} and no trace events: no report of oomph")
    try:
        values = parse_json(read_regular(file, most=LARGEST_JSON))
    except OSError as error:
        raise BadInput(f"cannot read {file}: {error.strerror}") from None
    except BadJson as error:
        raise BadInput(f"{file} is no JSON, or only part of it: {error}") from None
    return explain_values(values, str(file))


def explain_values(values: Mapping[str, Any], source: str) -> Explanation:
    """Explain a JSON report by oomph."""
    for matches, shape, say in _READERS:
        if matches(values):
            try:
                return say(read_as(shape, values, open_ended=True), source, values)
            except Mismatch as problem:
                raise BadInput(
                    f"{source} was changed into something else, or is of another version of oomph:"
                    f" {problem}"
                ) from None
    if "error" in values:
        raise BadInput(f"{source} holds an error, not a result: {brief(values['error'])}")
    raise BadInput(
        f"{source} is no report of oomph: those of watch, estimate --json, plan --json and train"
        " --json can be explained"
    )


# --- reports of oomph -----------------------------------------------------------------------------


def _explain_watch(found: WatchShape, source: str, values: Mapping[str, Any]) -> Explanation:
    from oomph.explaining.watching import say_remedy

    memory = found.memory
    return Explanation(
        source=source,
        kind="watch report",
        headline=found.headline,
        predicted=False,
        ledgers={
            "allocated": memory.allocated,
            "reserved": memory.reserved,
            "device": memory.total - memory.free,
        },
        categories=found.categories,
        modules=found.modules,
        sites={one.place or one.name: one.size for one in found.held},
        advice=tuple(map(say_remedy, found.remedies)),
        details=dict(values),
    )


def _explain_estimate(found: EstimateShape, source: str, values: Mapping[str, Any]) -> Explanation:
    at, verdict = found.peak_at, found.verdict.replace("_", " ")
    of = f" of {format_bytes(found.budget)}" if found.budget is not None else ""
    where = f"at {at.module}" if at.module else f"in {at.op}"
    return Explanation(
        source=source,
        kind="estimate",
        headline=(
            f"{verdict}: {found.job} needs {format_bytes(found.peak.device)}{of} (predicted) on"
            f" {found.gpu or 'the CPU'}; the peak is in {at.phase} {where}, where"
            f" {_largest(found.categories_at_peak)}"
        ),
        predicted=True,
        ledgers=found.peak.as_dict(),
        categories=found.categories_at_peak,
        modules=found.modules_at_peak,
        sites={},
        advice=(f"the smallest budget it would run in: {format_bytes(found.smallest_budget)}",)
        if found.verdict != "fits"
        else (),
        details=dict(values),
    )


def _explain_plan(found: PlanShape, source: str, values: Mapping[str, Any]) -> Explanation:
    peak, made_for = found.predicted.peak, found.made_for
    categories = found.predicted.categories_at_peak
    changes = [f"{one.technique}: {one.before} → {one.after}" for one in found.changes]
    return Explanation(
        source=source,
        kind="plan",
        headline=(
            f"fits: {made_for.job} needs {format_bytes(peak.device)} of"
            f" {format_bytes(found.budget)} (predicted) on {made_for.gpu or 'the CPU'} with"
            f" {len(changes)} changes; at the peak {_largest(categories)}"
        ),
        predicted=True,
        ledgers=peak.as_dict(),
        categories=categories,
        modules={},
        sites={},
        advice=tuple(changes),
        details=dict(values),
    )


def _explain_training(found: TrainingShape, source: str, values: Mapping[str, Any]) -> Explanation:
    plan = _explain_plan(found.plan, source, {})
    measured = found.measured.peak
    peak = measured.as_dict() if measured is not None else plan.ledgers
    said = "measured" if measured is not None else "predicted; the CPU's was not measured"
    off = ""
    if measured is not None and plan.ledgers["device"]:
        off = f", {peak['device'] / plan.ledgers['device'] - 1:+.1%} of the prediction"
    return Explanation(
        source=source,
        kind="training",
        headline=(
            f"trained: {found.job} took {format_bytes(peak['device'])} ({said}{off}) in"
            f" {found.steps} steps"
        ),
        predicted=measured is None,
        ledgers=peak,
        categories=plan.categories,
        modules={},
        sites={},
        advice=plan.advice,
        details=dict(values),
    )


def _explain_no_plan(found: NoPlanShape, source: str, values: Mapping[str, Any]) -> Explanation:
    smallest = found.smallest_budget
    return Explanation(
        source=source,
        kind="plan",
        headline=f"does not fit: {found.job} on {found.gpu or 'the CPU'}; {found.reason}",
        predicted=True,
        ledgers={"device": smallest},
        categories={},
        modules={},
        sites={},
        advice=(f"the smallest budget with a plan: {format_bytes(smallest)} (predicted)",),
        details=dict(values),
    )


_Values = Mapping[str, Any]
#: For each kind of report: how to recognize it, its schema, and its explanation.
_READERS: tuple[tuple[Callable[[_Values], bool], Any, Callable[..., Explanation]], ...] = (
    (lambda values: values.get("kind") == "oomph watch", WatchShape, _explain_watch),
    (lambda values: values.get("kind") == "oomph plan", PlanShape, _explain_plan),
    (
        lambda values: "plan" in values and "measured" in values,
        TrainingShape,
        _explain_training,
    ),
    (
        lambda values: "categories_at_peak" in values and "peak" in values,
        EstimateShape,
        _explain_estimate,
    ),
    (
        lambda values: "smallest_budget" in values and "reason" in values,
        NoPlanShape,
        _explain_no_plan,
    ),
)


# --- files of PyTorch -----------------------------------------------------------------------------


def explain_snapshot(snapshot: Snapshot, source: str) -> Explanation:
    """Explain a memory snapshot."""
    at_end = snapshot.peak == snapshot.allocated or not snapshot.sites_at_peak
    sites = snapshot.sites if at_end else snapshot.sites_at_peak
    return Explanation(
        source=source,
        kind="snapshot",
        headline=_snapshot_headline(snapshot, sites),
        predicted=False,
        ledgers={"allocated": snapshot.peak, "reserved": snapshot.reserved},
        categories={},
        modules={},
        sites=sites,
        advice=tuple(_snapshot_advice(snapshot)),
        details=snapshot.as_dict(),
    )


def _snapshot_headline(snapshot: Snapshot, sites: dict[str, int]) -> str:
    if not snapshot.segments and not snapshot.events:
        return "the snapshot is empty: nothing was allocated, and no event was recorded"
    allocated, reserved = format_bytes(snapshot.allocated), format_bytes(snapshot.reserved)
    now = f"{allocated} allocated of {reserved} reserved"
    words = [now]
    if snapshot.ooms:
        oom = snapshot.ooms[-1]
        why = "it does not fit"
        if snapshot.unused >= oom.asked:
            why = f"memory is fragmented, {format_bytes(snapshot.unused)} reserved are unused"
        words = [
            f"out of memory: {format_bytes(oom.asked)} asked for with {format_bytes(oom.free)}"
            f" free; {why}; {now}"
        ]
    elif snapshot.peak > snapshot.allocated:
        words = [f"the peak was {format_bytes(snapshot.peak)} allocated; {now} when it was taken"]
    largest = next(iter(sites.items()), None)
    if largest is not None and largest[0] != NO_STACK:
        words.append(f"most of it from {largest[0]} ({format_bytes(largest[1])})")
    return ", ".join(words)


def _snapshot_advice(snapshot: Snapshot) -> list[str]:
    advice = []
    if snapshot.unused > _MUCH_UNUSED * snapshot.reserved:
        advice.append(
            f"{format_bytes(snapshot.unused)} are reserved and unused, in"
            f" {snapshot.unused_blocks:,} pieces of at most"
            f" {format_bytes(snapshot.largest_unused)}:"
            " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True would give them back (predicted)"
        )
    if list(snapshot.sites) == [NO_STACK]:
        advice.append(
            "no stacks were recorded: call torch.cuda.memory._record_memory_history() first"
        )
    return advice


def explain_trace(trace: Trace, source: str) -> Explanation:
    """Explain a profiler trace."""
    running = f", in {' in '.join(trace.running[:3])}" if trace.running else ""
    sites: dict[str, int] = {}
    for name, size in trace.largest:
        sites[name] = max(size, sites.get(name, 0))
    return Explanation(
        source=source,
        kind="trace",
        headline=(
            f"the peak on {trace.device} was {format_bytes(trace.peak_allocated)} allocated of"
            f" {format_bytes(trace.reserved_at_peak)} reserved, {trace.at_seconds:.3f} s after the"
            f" first memory event{running}"
        ),
        predicted=False,
        ledgers={"allocated": trace.peak_allocated, "reserved": trace.peak_reserved},
        categories={},
        modules={},
        sites=sites,
        advice=(),
        details=trace.as_dict(),
    )


# --- parts ----------------------------------------------------------------------------------------


def _largest(sizes: dict[str, int]) -> str:
    parts = [f"{name} {format_bytes(size)}" for name, size in list(sizes.items())[:2]]
    return " and ".join(parts) + " are alive" if parts else "nothing is known to be alive"
