"""Number formats in which a job can be run."""

from __future__ import annotations

from typing import Literal

Precision = Literal["fp32", "tf32", "bf16-mixed", "fp16-mixed", "bf16"]
