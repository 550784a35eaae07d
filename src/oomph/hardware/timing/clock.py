"""A clock for rehearsals: predicts the seconds of each kernel on a GPU.

A kernel takes a moment to begin, and then the longer of its arithmetic at the GPU's rate and its
bytes at the GPU's bandwidth. No kernel reaches the data sheet's numbers; the shares that they reach
are below, by kind, measured on an H200. A measured profile replaces them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from oomph.hardware import GPU
from oomph.hardware.profile import load_profile
from oomph.hardware.timing.work import Work

#: The share of the data sheet's rate that large kernels of a kind reach.
EFFICIENCY: Mapping[str, float] = {
    # In a long step: bursts reach 0.80 before the GPU lowers its clock.
    "product": 0.72,
    "convolution": 0.35,
    "attention": 0.49,
    "attention backward": 0.39,
    "elementwise": 0.87,
}
#: The share of a burst's rate, which profiles record, that remains in a long step on an H200.
SUSTAINED = EFFICIENCY["product"] / 0.80
#: Profiles record the rate of one convolution including its layout conversions; those in nets, not
#: counting conversions, reach more on an H200.
UNCONVERTED = EFFICIENCY["convolution"] / 0.288
#: The share of a large copy's bandwidth that layout conversions reach: 12.1 GB in the 6.25 ms of
#: nchwToNhwc and nhwcToNchw in a step of resnet-50 in bf16 on an H200.
CONVERSION_REACH = 0.46
#: Seconds from the start of a kernel to the start of the next, beyond the first one's work.
BETWEEN_KERNELS = 1.8e-6

#: Host seconds for each kernel launch, with the Python around it; and for a bare launch, as
#: profiles record: measured beside an H200 with Hugging Face models whose kernels were too small to
#: matter, 20e-6 to 28e-6 eager and 27e-6 to 37e-6 compiled.
LAUNCH, BARE_LAUNCH = 3e-5, 6.7e-6
#: A host with some cores, to compare plans for the CPU; its seconds are only relative.
HOST = GPU(
    name="cpu",
    vendor="host",
    architecture="cpu",
    compute_capability=None,
    sm_count=1,
    memory=0,
    memory_bandwidth=20e9,
    host_link=20e9,
    rates={"fp32": 1e11, "fp64": 5e10},
)


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Predicts seconds on one GPU."""

    gpu: GPU
    tf32: bool = False
    """Whether fp32 products run as TF32."""
    efficiency: Mapping[str, float] = field(default_factory=lambda: EFFICIENCY)
    launch: float = LAUNCH
    """Host seconds to launch a kernel."""

    @classmethod
    def of(cls, gpu: GPU | None) -> Clock:
        """The clock of a GPU, using its profile from this machine if there is one; or the CPU's."""
        if gpu is None:
            return cls(gpu=HOST)
        profile = load_profile(gpu.name)
        if profile is None:
            return cls(gpu=gpu)
        measured = profile.efficiency(gpu)
        if "product" in measured:
            measured["product"] *= SUSTAINED
        if "convolution" in measured:
            measured["convolution"] *= UNCONVERTED
        slower = (profile.launch_seconds or BARE_LAUNCH) / BARE_LAUNCH
        return cls(gpu=gpu, efficiency={**EFFICIENCY, **measured}, launch=slower * LAUNCH)

    def moving(self, nbytes: int) -> float:
        """Seconds in which the GPU reads or writes this many bytes."""
        return nbytes / (self.gpu.memory_bandwidth * self.efficiency["elementwise"])

    def seconds(self, work: Work) -> float:
        """Seconds of a kernel; zero if nothing is launched."""
        if not work.bytes and not work.flops:
            return 0.0
        beside = BETWEEN_KERNELS + self.moving(work.converted) / CONVERSION_REACH
        if not work.flops:
            return beside + self.moving(work.bytes) / work.reach
        reached = self._rate(work.dtype) * self.efficiency[work.kind] * work.reach
        return beside + max(self.moving(work.bytes), work.flops / reached)

    def _rate(self, dtype: str) -> float:
        return _rate(self.gpu, "tf32" if dtype == "fp32" and self.tf32 else dtype)


@functools.cache
def _rate(gpu: GPU, dtype: str) -> float:
    """The GPU's rate for a dtype, or for the nearest supported one that can hold its values."""
    for name in (dtype, *{"bf16": ("fp32",), "tf32": ("fp32",)}.get(dtype, ()), "fp32"):
        if name in gpu.rates:
            return gpu.rates[name]
    raise AssertionError("every card of the catalogue has an fp32 rate")
