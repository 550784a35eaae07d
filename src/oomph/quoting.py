"""Make foreign values safe for messages: short, and without terminal control characters."""

from __future__ import annotations

import re
from typing import Any

#: Characters that move a terminal's cursor or reverse its text, and unpaired surrogates.
_ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with terminal control characters replaced."""
    return _ODD.sub("?", text)


def brief(value: Any) -> str:
    """A short text for a value in a message, whatever its size."""
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else f"{value[:57]}...")
    if isinstance(value, dict):
        return f"an object of {len(value)}" if value else "{}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "[]"
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of more than 40 digits"
    return repr(value)
