"""A dataclass is its own schema: what does not fit is named, with what belongs there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import pytest

from oomph.files.plain_toml import parse_toml
from oomph.files.schema import Count, Mismatch, Positive, read_as


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: Count
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner
    colour: Colour
    kind: Literal["one", "two"]
    rate: Positive
    pairs: tuple[tuple[str, int], ...]
    table: Mapping[str, Inner]
    flag: bool = False
    more: Any = None
    notes: list[str] = field(default_factory=list)


GOOD = {
    "inner": {"size": 3},
    "colour": "red",
    "kind": "two",
    "rate": 2,
    "pairs": [["a", 1], ["b", 2]],
    "table": {"x": {"size": 0, "name": "n"}},
    "more": {"any": ["thing"]},
}


def test_a_dataclass_is_read_with_all_that_is_in_it() -> None:
    assert read_as(Outer, GOOD) == Outer(
        inner=Inner(size=3),
        colour=Colour.RED,
        kind="two",
        rate=2.0,
        pairs=(("a", 1), ("b", 2)),
        table={"x": Inner(size=0, name="n")},
        more={"any": ["thing"]},
    )


def edited(path: str, value: Any) -> dict[str, Any]:
    import copy

    values = copy.deepcopy(GOOD)
    at: Any = values
    *parents, last = path.split("/")
    for parent in parents:
        at = at[int(parent) if parent.isdigit() else parent]
    if value is KeyError:
        del at[last]
    else:
        at[int(last) if last.isdigit() else last] = value
    return values


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("inner", 3, r"^inner cannot be 3: an object belongs there$"),
        ("inner", KeyError, r"^it lacks 'inner'$"),
        ("inner/size", KeyError, r"^inner lacks 'size'$"),
        ("inner/size", "many", r"^inner\.size cannot be 'many': a whole number that is not neg"),
        ("inner/size", True, r"^inner\.size cannot be True"),
        ("inner/size", 1.0, r"^inner\.size cannot be 1\.0"),
        ("inner/size", -1, r"^inner\.size cannot be -1"),
        ("inner/size", 10**30, r"^inner\.size cannot be 1000"),
        ("inner/name", 7, r"^inner\.name cannot be 7: text belongs there"),
        ("inner/other", 7, r"^inner has 'other', which is unknown"),
        ("colour", "green", r"^colour cannot be 'green': red or blue belongs there"),
        ("colour", ["red"], r"^colour cannot be a list of 1: red or blue"),
        ("kind", {}, r"^kind cannot be \{\}: one or two"),
        ("rate", 0, r"^rate cannot be 0: a positive number"),
        ("rate", float("nan"), r"^rate cannot be nan: a positive number"),
        ("rate", float("inf"), r"^rate cannot be inf"),
        ("rate", 10**400, r"^rate cannot be a number of more than 40 digits"),
        ("rate", "2", r"^rate cannot be '2'"),
        ("pairs", {}, r"^pairs cannot be \{\}: a list belongs there"),
        ("pairs/1", ["b"], r"^pairs\[1\] cannot be a list of 1: a list of 2"),
        ("pairs/1/1", "x", r"^pairs\[1\]\[1\] cannot be 'x'"),
        ("table/x/size", None, r"^table\.x\.size cannot be None"),
        ("flag", 1, r"^flag cannot be 1: true or false belongs there"),
        ("notes", ["a", 2], r"^notes\[1\] cannot be 2: text"),
    ],
)
def test_the_field_and_what_belongs_there_are_named(path: str, value: Any, words: str) -> None:
    with pytest.raises(Mismatch) as caught:
        read_as(Outer, edited(path, value))
    import re

    assert re.search(words, str(caught.value)), str(caught.value)


def test_files_of_a_later_version_may_say_more() -> None:
    values = edited("inner/other", 7)
    assert read_as(Outer, values, open_ended=True).inner == Inner(size=3)


def test_a_long_value_is_not_repeated() -> None:
    with pytest.raises(Mismatch) as caught:
        read_as(Inner, {"size": "x" * 10_000})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 2000 + "]" * 2000,
        ".".join(["a"] * 100_000) + " = 1",
        "\n".join(f'a = "{"x" * 390}"' for _ in range(2000)),
        "a = [\n" + "[\n" * 3000,
        "a = 1\na = 2",
    ],
)
def test_toml_that_would_take_all_stack_or_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_toml(text)
