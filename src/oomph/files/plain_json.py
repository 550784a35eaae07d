"""Parses JSON from any source, with limits on size, depth and count.

Python's parser can turn two bytes into tens, recurses until its stack ends, accepts numbers that no
float can hold, and lets the last of two equal keys win. Whatever is refused raises a `BadJson`
whose message names the place: `steps[3].loss`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from oomph.quoting import brief, printable

#: Limits on a file: bytes, values and levels. Reports, plans and manifests have far less.
MOST_BYTES = 256 << 20
MOST_VALUES = 10_000_000
DEEPEST = 100

#: Larger integers are not plausible sizes, counts or seeds.
_LARGEST = 1 << 64
#: Matches any text that may have unprintable characters; other text is not checked again.
_PERHAPS_ODD = re.compile(
    r"\\(?:[bfr]|u(?:00[0189]|007[fF]|[dD][89a-fA-F]|20[26]))|[\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)


class BadJson(ValueError):
    """Why a text is not JSON that oomph reads."""


def parse_json(
    content: bytes | str,
    *,
    deepest: int = DEEPEST,
    most_values: int = MOST_VALUES,
    any_number: bool = False,
    unique_keys: bool = True,
    any_text: bool = False,
) -> Any:
    """Parse the value in a text.

    `any_number` allows NaN, infinities and integers of any size. Without `unique_keys`, the last of
    two equal keys wins. With `any_text`, strings stay as they are; otherwise control characters and
    lone surrogates, which may break terminals and files, become question marks.
    """
    text = _decoded(content)
    if text.count("[") + text.count("{") + text.count(",") > most_values:
        raise BadJson(f"it has more than {most_values:,} values")
    try:
        value = json.loads(text, object_pairs_hook=_unique if unique_keys else None)
    except RecursionError:
        raise BadJson(f"it is nested more than {deepest} levels deep") from None
    except ValueError as error:  # also for integers with thousands of digits
        raise BadJson(str(error)) from None
    _check(value, deepest, any_number=any_number)
    if not any_text and _PERHAPS_ODD.search(text):
        value = _printable(value)
    return value


def _decoded(content: bytes | str) -> str:
    if isinstance(content, str):
        return content
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadJson(f"it is no text: {error.reason} at byte {error.start:,}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise BadJson(f"it has {brief(twice)} twice in one object")
    return found


def _check(value: Any, deepest: int, *, any_number: bool) -> None:
    """Check all values without recursion; each carries its place as a chain of parents."""
    waiting: list[tuple[Any, int, _Place | None]] = [(value, 1, None)]
    while waiting:
        here, depth, place = waiting.pop()
        if type(here) is dict or type(here) is list:
            if depth > deepest:
                raise BadJson(f"it is nested more than {deepest} levels deep")
            for key, one in _children(here):
                kind = type(one)
                if kind is dict or kind is list:
                    waiting.append((one, depth + 1, (place, key)))
                elif not any_number and (kind is int or kind is float) and not _is_sane(one):
                    raise BadJson(f"{_say(place, key)} cannot be {brief(one)}")
        elif not any_number and type(here) in (int, float) and not _is_sane(here):
            raise BadJson(f"it cannot be {brief(here)}")


#: The place of the parent, and the key in it.
_Place = tuple[Any, "str | int"]


def _children(value: Any) -> Iterator[tuple[str | int, Any]]:
    return iter(value.items() if type(value) is dict else enumerate(value))


def _is_sane(number: float) -> bool:
    if isinstance(number, int):
        return -_LARGEST < number < _LARGEST
    return math.isfinite(number)


def _say(place: _Place | None, key: str | int) -> str:
    keys = [key]
    while place is not None:
        place, key = place
        keys.append(key)
    return join_path(keys[::-1])


def _printable(value: Any) -> Any:
    """Make all strings printable in a value whose depth is known to be small."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_printable(one) for one in value]
    if isinstance(value, dict):
        return {printable(key): _printable(one) for key, one in value.items()}
    return value


def join_path(keys: list[str | int]) -> str:
    """Join the parts of a path to `steps[3].loss`."""
    words = ""
    for key in keys:
        if isinstance(key, int):
            words += f"[{key}]"
        else:
            shown = key if re.fullmatch(r"[\w./-]{1,100}", key) else brief(key)
            words += f".{shown}" if words else shown
    return words
