"""The savings and costs of adaptive precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from oomph.hardware import GPU
from oomph.hardware.timing.clock import Clock
from oomph.jobs.job import Job
from oomph.precision.probe import Cost, Divergence
from oomph.rehearsal.allocator.settings import AllocatorSettings
from oomph.rehearsal.hidden import device_overhead
from oomph.rehearsal.phases import rehearse
from oomph.rehearsal.replaying import replay
from oomph.rehearsal.step_cost import cost_between
from oomph.rehearsal.timeline import END_OF_STEP
from oomph.techniques.layer_precision import LayerPrecision
from oomph.techniques.number_formats import LEVELS, Level
from oomph.units import format_bytes


@dataclass(kw_only=True)
class Spent:
    """Measurements during adaptive precision."""

    in_steps: float = 0.0
    """Seconds of steps and evaluations."""
    in_probes: float = 0.0
    probes: int = 0
    taken_back: int = 0
    """Non-finite steps that were run again."""
    now: Cost | None = None
    """The cost of the last probe's samples at the levels at that time."""
    in_fp32: Cost | None = None

    def probing(self, seconds: float) -> None:
        """Record the seconds that a probe took."""
        self.in_probes += seconds
        self.probes += 1

    def compared(self, now: Cost, in_fp32: Cost) -> None:
        """Record the costs of the same samples at the current levels and in fp32."""
        self.now, self.in_fp32 = now, in_fp32


@dataclass(frozen=True, kw_only=True)
class PrecisionReport:
    """Measurements since the run began to adapt its precision, or was resumed."""

    levels: Mapping[str, Level]
    moves: int
    divergence: Divergence | None
    """Of the last probe: what the levels cost in accuracy."""
    spent: Spent
    device: str

    @property
    def probing(self) -> float:
        """The share of time spent in probes."""
        whole = self.spent.in_probes + self.spent.in_steps
        return self.spent.in_probes / whole if whole else 0.0

    def __str__(self) -> str:
        counts = Counter(self.levels.values())
        lines = [
            f"{len(self.levels)} layers: "
            + ", ".join(f"{counts[level]} in {level}" for level in Level if counts[level])
            + f", after {self.moves} moves",
            f"{self.spent.probes} probes took {self.probing:.1%} of the time (measured);"
            f" {self.spent.taken_back} steps were taken back",
        ]
        if self.divergence is not None:
            layers = self.divergence.layers
            worst = max(layers, key=lambda path: layers[path].relative)
            lines.append(
                f"the last probe's loss was {self.divergence.loss:.2g} from fp32's, its gradients"
                f" up to {layers[worst].relative:.2g} (in {worst}, cosine"
                f" {layers[worst].cosine:.4f})"
            )
        now, full = self.spent.now, self.spent.in_fp32
        if now is not None and full is not None:
            lines.append(
                f"its samples took {now.seconds:.3g} s at the levels of then and {full.seconds:.3g}"
                f" s in fp32, uncompiled (measured on the {self.device})"
            )
            if now.held is not None and full.held is not None:
                lines.append(
                    f"between forward and backward they held {format_bytes(now.held)} instead of"
                    f" {format_bytes(full.held)} (measured)"
                )
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """A step at given levels, rehearsed for a GPU."""

    peak: int
    """Device memory."""
    seconds: float


def predict_step(job: Job, levels: Mapping[str, Level], gpu: GPU) -> PredictedStep:
    """Rehearse a step of the job on a GPU, unchanged except for its layers' levels."""
    own = LEVELS.get(job.precision)

    def set_levels(model: nn.Module, *_: Any) -> None:
        for path, level in levels.items():
            if level is not own:
                LayerPrecision(model.get_submodule(path), "cuda").apply(level)

    clock = Clock.of(gpu)
    timeline = rehearse(job, gpu, ("step",), watch=set_levels, clock=clock)
    peak = replay(timeline, AllocatorSettings()).peak(("step",))
    first, last = (mark for mark in timeline.marks if mark.name == END_OF_STEP)
    return PredictedStep(
        peak=peak.reserved + device_overhead(gpu).expected,
        seconds=cost_between(first, last).seconds(clock),
    )
