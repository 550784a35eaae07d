"""Limits on the size of a model from a config: far above any model, far below what never ends.

Building a model creates Python objects for each layer, label and expert, and tables for positions
and words. The largest models published have a few hundred layers, 10 million positions, a million
words and trillions of parameters: each limit is above that by a factor of ten or more.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from oomph.errors import BadInput

#: How deeply configs may nest, and how many values a file may hold.
MOST_DEPTH = 24
MOST_VALUES = 2_000_000
#: Longest list: lists of settings have an entry for each layer; lists of tokens may be longer.
MOST_ENTRIES = 4_000
_LONG_LISTS = re.compile(r".*(ids?|tokens|words|labels)")

#: Limits by field name, first match; a number in a list counts by the list's name.
_LIMITS: tuple[tuple[str, int], ...] = (
    # Settings that are not counts: identifiers, bases of angles, limits of tokenizers.
    (r".*(_token_id|_index|_id|_ids|theta|_base|seed|timescale|value|max_length)", 10**40),
    (r".*(vocab|entity|codebook_size|num_embeddings).*", 100_000_000),
    (
        r".*(position|max_.*_len|max_len|n_ctx|context_len|seq_len|max_source|max_target).*",
        2 * 10**8,
    ),
    (r".*(image|input|patch|window|kernel|crop|frame|pool|stride).*", 1_000_000),
    (r"(.*layers?|.*depths?|.*blocks?|.*stages?|.*repeats?|.*cycles|.*times|block_sizes)", 4_000),
    (r".*(layers|blocks)_per_.*|.*_flows|.*levels|.*convs?|.*iterations|.*hidden_groups", 4_000),
    (r".*(sizes?|dims?|width|channels?|rank|features|d_model|d_ff|d_kv|embd|inner)", 16_000_000),
    (r".*(labels|classes|queries|proposals)", 300_000),
    (r".*(expert|heads?|groups).*", 65_536),
    (r"(num|n)_.*", 4_000_000),
)
_MATCHED = tuple((re.compile(pattern), most) for pattern, most in _LIMITS)
_LABELS = {"id2label", "label2id"}
#: Limit for any other whole number.
_MOST = 10**9


def check_sizes(values: Mapping[str, Any], source: object) -> None:
    """Refuse a config that asks for more of something than any model has."""
    for count, (where, key, value) in enumerate(_numbers(values, source), start=1):
        if count > MOST_VALUES:
            raise BadInput(f"{source} holds more than {MOST_VALUES:,} values, which no config does")
        if isinstance(value, list) and len(value) > MOST_ENTRIES and not _LONG_LISTS.fullmatch(key):
            raise BadInput(
                f"{source}: {where} is a list of {len(value):,}, above the limit of"
                f" {MOST_ENTRIES:,}: no model has as many layers"
            )
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        most = _limit(key)
        if most is None:
            if isinstance(value, float):
                continue
            most = _MOST
        if abs(value) > most:
            raise BadInput(
                f"{source}: {where} is {_shown(value)}, above the limit of {most:,}: no model has"
                " as many, and building them would not end"
            )


def _shown(value: float) -> str:
    """The number in a few digits; a whole number may be too large for a float."""
    if abs(value) < 10**15:
        return f"{value:,}"
    return f"{float(max(-(10**300), min(value, 10**300))):.3g}"


@functools.cache
def _limit(key: str) -> int | None:
    name = key.lower()
    return next((most for pattern, most in _MATCHED if pattern.fullmatch(name)), None)


def _numbers(values: Mapping[str, Any], source: object) -> Iterator[tuple[str, str, Any]]:
    """Every value with its path and its name, without recursion."""
    waiting: list[tuple[str, str, Any, int]] = [("", "", values, 0)]
    while waiting:
        where, key, value, depth = waiting.pop()
        if depth > MOST_DEPTH:
            raise BadInput(
                f"{source} nests values {MOST_DEPTH} deep and more, which no config does"
            )
        yield where, key, value
        if isinstance(value, Mapping):
            waiting += [
                (
                    f"{where}.{inner}" if where else str(inner),
                    # Labels are words of the model's task, not settings.
                    "labels" if key in _LABELS else str(inner),
                    item,
                    depth + 1,
                )
                for inner, item in value.items()
            ]
        elif isinstance(value, list):
            waiting += [(where, key, item, depth + 1) for item in value]
