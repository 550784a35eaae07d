"""JSON of strangers takes no more stack, memory or time than is said, and says what is wrong."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.files.plain_json import BadJson, parse_json
from oomph.quoting import brief, printable

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(min_codepoint=32, max_codepoint=126)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=20,
)


@given(values)
def test_plain_values_come_back_as_they_were(value) -> None:
    text = json.dumps(value)
    assert parse_json(text, any_text=True) == value
    assert parse_json(text.encode(), any_text=True) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 1_000_000, "nested more than 100 levels"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested more than 100 levels"),
        ("[" * 101 + "]" * 101, "nested more than 100 levels"),
        ('{"steps": [1, {"loss": NaN}]}', r"steps\[1\]\.loss cannot be nan"),
        ('{"a": Infinity}', "a cannot be inf"),
        ('{"a": 1e999}', "a cannot be inf"),
        ('{"a": ' + "9" * 100 + "}", "a cannot be a number of more than 40 digits"),
        ('{"a": 18446744073709551617}', "a cannot be 18446744073709551617"),
        ('{"a": ' + "9" * 10_000 + "}", "digits"),
        ("NaN", "it cannot be nan"),
        ('{"a": 1, "b": 2, "a": 3}', "'a' twice"),
        ('{"a": {"b": 1, "b": 1}}', "'b' twice"),
        ("", "Expecting value"),
        ('{"a": 1', "Expecting"),
        ("[1] [2]", "Extra data"),
    ],
)
def test_what_no_reader_could_trust_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(BadJson, match=words):
        parse_json(text)


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(BadJson, match="it is no text"):
        parse_json(b'{"a": "\xff"}')


def test_values_are_counted_before_they_are_made() -> None:
    with pytest.raises(BadJson, match="more than 1,000 values"):
        parse_json("[" + "[]," * 1000 + "[]]", most_values=1000)


def test_a_hundred_levels_are_read() -> None:
    assert parse_json("[" * 100 + "]" * 100)


def test_formats_of_others_may_have_what_they_have() -> None:
    found = parse_json('{"a": Infinity, "a": NaN, "b": ' + "9" * 99 + "}",
                       any_number=True, unique_keys=False)  # fmt: skip
    assert math.isnan(found["a"]) and found["b"] > 10**90


def test_words_obey_no_stranger_on_a_terminal() -> None:
    text = json.dumps({"a\x1b[2J": ["x\u202ey", "tab\tline\nend", "\ud800", "caf\u00e9 \u2192"]})
    assert parse_json(text) == {"a?[2J": ["x?y", "tab\tline\nend", "?", "caf\u00e9 \u2192"]}
    assert json.dumps(parse_json(text, any_text=True)) == text
    assert parse_json('"\x7f\x9b"') == "??"


@given(st.text())
def test_what_is_printable_can_be_written(text: str) -> None:
    printable(text).encode()
    assert not set(printable(text)) & set("\x1b\x07\x08\r\x9b\u202e")


@given(st.recursive(st.integers() | st.text() | st.floats(), st.lists, max_leaves=50))
def test_what_is_said_of_a_value_is_short(value) -> None:
    assert len(brief(value)) <= 300


def test_a_number_of_thousands_of_digits_can_be_spoken_of() -> None:
    assert "more than 40 digits" in brief(10**5000)
