"""Memory that no tensor shows: the CUDA context, loaded kernels, and what is not known exactly.

The numbers are data (`hidden.toml`), each with how it was measured.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from oomph.gpus import GPU
from oomph.rehearsal.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class DeviceOverhead:
    """Device memory beyond what the allocator reserves."""

    expected: int
    low: int
    high: int
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Uncertainty:
    """How far a prediction may be off, as a part of it, both ways."""

    allocated: float
    reserved: float
    doubtful: bool
    """Whether some scratch memory is of a size that a library chooses by itself."""
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


def uncertainty(timeline: Timeline, gpu: GPU | None) -> Uncertainty:
    """How wide the interval around a prediction must be, and why."""
    if gpu is None:
        return Uncertainty(allocated=0.0, reserved=0.0, doubtful=False, reasons=())
    data = _data()["uncertainty"]
    entry = data["measured"] if gpu.architecture in data["architectures"] else data["other"]
    reasons = [entry["how"]]
    doubtful = sorted({block.op for block in timeline.blocks if block.doubtful})
    if doubtful:
        ops = ", ".join(doubtful)
        reasons.append(f"the library chooses the workspace of {ops} by itself: none, or twice ours")
    return Uncertainty(
        allocated=entry["allocated"],
        reserved=entry["reserved"],
        doubtful=bool(doubtful),
        reasons=tuple(reasons),
    )


@functools.cache
def _data() -> dict[str, Any]:
    text = resources.files("oomph.rehearsal").joinpath("hidden.toml").read_text()
    return tomllib.loads(text)
