"""Parses TOML from any source, with limits on its size and the length of its lines.

Python's parser takes time and memory that grow with the square of a key's number of parts.
"""

from __future__ import annotations

import tomllib
from typing import Any

#: Most characters of a file: tables written by people have far fewer.
MOST_BYTES = 256 << 10
_LONGEST_LINE = 400


def parse_toml(text: str) -> dict[str, Any]:
    """Parse the document, or raise a `ValueError` that says what is wrong."""
    lines = text.split("\n")
    if len(text) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES:,} characters")
    for number, line in enumerate(lines, start=1):
        if len(line) > _LONGEST_LINE:
            raise ValueError(f"line {number} has more than {_LONGEST_LINE} characters")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
