"""Work: what an op asks of the hardware, before anyone knows how fast that is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Floating-point operations and bytes of one kernel."""

    flops: float = 0.0
    dtype: str = ""
    """What the operations are in: `bf16`, `fp16`, `fp32` …; empty where there are none."""
    bytes: int = 0
    """Read and written."""
    converted: int = 0
    """Read and written before and after it, to bring images into the layout it wants and back."""
    kind: str = "elementwise"
    """`product`, `attention`, `convolution` or `elementwise`; each reaches its own part of the
    card's rate."""
    reach: float = 1.0
    """The part of what its kind reaches that its own shapes and kernel allow."""
    launches: float = 1.0
    """The time of the host that it takes, in launches of a plain kernel."""
