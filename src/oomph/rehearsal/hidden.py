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
    """How far allocated and reserved memory may be off."""

    relative: float
    """Of allocated, both ways."""
    reserved: float
    """Of reserved, both ways."""
    below: int
    above: int
    """Bytes, for kernels whose scratch memory is not known."""
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


def uncertainty(timeline: Timeline, gpu: GPU | None, peak_event: int) -> Uncertainty:
    """How wide the interval around a prediction must be, and why."""
    if gpu is None:
        return Uncertainty(relative=0.0, reserved=0.0, below=0, above=0, reasons=())
    data = _data()["uncertainty"]
    entry = data["measured"] if gpu.architecture in data["architectures"] else data["other"]
    reasons = [entry["how"]]
    doubtful = [block for block in timeline.alive_at(peak_event) if block.doubtful]
    spread = sum(block.size for block in doubtful)
    if spread:
        ops = ", ".join(sorted({block.op for block in doubtful}))
        reasons.append(f"the library chooses the workspace of {ops} by itself")
    return Uncertainty(
        relative=entry["allocated"],
        reserved=entry["reserved"],
        below=spread,
        above=spread,
        reasons=tuple(reasons),
    )


@functools.cache
def _data() -> dict[str, Any]:
    text = resources.files("oomph.rehearsal").joinpath("hidden.toml").read_text()
    return tomllib.loads(text)
