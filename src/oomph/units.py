"""Parse and format sizes in bytes: 24GiB in, 23.6 GiB out."""

from __future__ import annotations

import math
import re

from oomph.errors import BadInput
from oomph.quoting import brief

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_NUMBER = r"[-+]?[\d._]+(?:e[+-]?\d+)?|nan|inf"

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "k": KIB,
    "m": MIB,
    "g": GIB,
    "t": TIB,
}


def parse_bytes(text: str | int | float) -> int:
    """Convert `"24GiB"`, `"24 GB"` or a number of bytes to a positive whole number of bytes."""
    match = re.fullmatch(rf"\s*({_NUMBER})\s*([a-z]*)\s*", str(text).lower())
    if match is None or match[2] not in _UNITS:
        raise BadInput(f"cannot read {brief(text)} as memory; write it like 24GiB, 80GB or 512MiB")
    try:
        size = float(match[1]) * _UNITS[match[2]]
    except ValueError:
        raise BadInput(f"cannot read {brief(text)} as memory; write it like 24GiB") from None
    if not math.isfinite(size) or size < 1:
        raise BadInput(f"memory must be a positive, finite size, not {brief(text)}")
    if size > 1024 * TIB:
        raise BadInput(f"{brief(text)} is more than a pebibyte; is the unit right?")
    return int(size)


def format_bytes(size: float) -> str:
    """Format a size with three or four digits and a binary unit: `23.6 GiB`."""
    if size < 0:
        return "-" + format_bytes(-size)
    for unit, scale in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= scale:
            value = size / scale
            return f"{value:.2f} {unit}" if value < 100 else f"{value:.1f} {unit}"
    return f"{int(size)} B"
