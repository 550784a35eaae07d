"""Work: the operations and bytes of an op, independent of the hardware's speed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Floating-point operations and bytes of one kernel."""

    flops: float = 0.0
    dtype: str = ""
    """Dtype of the operations: `bf16`, `fp16`, `fp32` …; empty if there are none."""
    bytes: int = 0
    """Bytes read and written."""
    converted: int = 0
    """Bytes read and written to convert images to the layout the kernel needs and back."""
    kind: str = "elementwise"
    """`product`, `attention`, `convolution` or `elementwise`; each reaches its own share of the
    GPU's rate."""
    reach: float = 1.0
    """The share of its kind's rate that its own shapes and kernel reach."""
    launches: float = 1.0
    """Host time that it takes, in launches of a plain kernel."""
