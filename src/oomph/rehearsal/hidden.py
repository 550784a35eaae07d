"""Memory that no tensor shows: the CUDA context, loaded kernels, and uncertain amounts.

The numbers are data (`hidden.toml`), each with how it was measured.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch

from oomph.hardware import GPU
from oomph.rehearsal.timeline import Category, Timeline


@dataclass(frozen=True, kw_only=True)
class DeviceOverhead:
    """Device memory beyond what the allocator reserves."""

    expected: int
    low: int
    high: int
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Uncertainty:
    """How far a prediction may be off, as a fraction of it, in both directions."""

    allocated: float
    reserved: float
    doubtful: bool
    """Whether there is scratch memory whose size a library chooses by itself."""
    unchecked: int
    """Bytes that ops never compared with a GPU might take beyond their outputs: as many as the
    largest of those outputs."""
    reasons: tuple[str, ...]


def device_overhead(gpu: GPU | None) -> DeviceOverhead:
    """Context and loaded kernels of a training process on this GPU."""
    if gpu is None:
        return DeviceOverhead(expected=0, low=0, high=0, reasons=())
    data = _data()["overhead"]
    measured = data["measured"].get(gpu.architecture)
    entry = measured or data["other"]
    return DeviceOverhead(
        expected=entry["expected"],
        low=entry["low"],
        high=entry["high"],
        reasons=(entry["how"],),
    )


def uncertainty(timeline: Timeline, gpu: GPU | None, *, expandable: bool = False) -> Uncertainty:
    """How wide the interval around a prediction must be, and why."""
    if gpu is None:
        return Uncertainty(allocated=0.0, reserved=0.0, doubtful=False, unchecked=0, reasons=())
    data = _data()["uncertainty"]
    entry = data["measured"] if gpu.architecture in data["architectures"] else data["other"]
    reasons = [entry["how"]]
    doubtful = sorted({block.op for block in timeline.blocks if block.doubtful})
    if doubtful:
        ops = ", ".join(doubtful)
        reasons.append(f"the library chooses the workspace of {ops} by itself: none, or twice ours")
    unchecked = [
        block
        for block in timeline.blocks
        if block.category is not Category.WORKSPACE and not is_checked(block.op)
    ]
    if unchecked:
        ops = ", ".join(sorted({block.op for block in unchecked}))
        reasons.append(f"never compared with a GPU, so it may take more than its outputs: {ops}")
    return Uncertainty(
        allocated=entry["allocated"],
        reserved=entry["reserved_expandable" if expandable else "reserved"],
        doubtful=bool(doubtful),
        unchecked=max((block.size for block in unchecked), default=0),
        reasons=tuple(reasons),
    )


@functools.cache
def is_checked(op: str) -> bool:
    """Whether an op's memory is known: seen on a GPU, or of a kind that takes only its outputs."""
    namespace, _, name = op.partition(".")
    if namespace == "oomph":
        return True  # our own kernels; tests on a GPU check that they take only their outputs
    if namespace != "aten":
        return False  # a library's own kernel
    base, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, base), overload)
    by_nature = operator.is_view or torch.Tag.pointwise in operator.tags or base in _FACTORIES
    return by_nature or name in _checked_ops()


#: Ops that create a tensor and allocate nothing else.
_FACTORIES = {"arange", "lift_fresh", "empty_strided", "new_empty", "new_full", "stack"}


@functools.cache
def _checked_ops() -> frozenset[str]:
    text = resources.files("oomph.rehearsal.cuda").joinpath("checked_ops.toml").read_text()
    return frozenset(tomllib.loads(text)["ops"])


@functools.cache
def _data() -> dict[str, Any]:
    text = resources.files("oomph.rehearsal").joinpath("hidden.toml").read_text()
    return tomllib.loads(text)
