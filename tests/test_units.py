"""Bytes as people write them."""

from __future__ import annotations

import pytest

from oomph.errors import BadInput
from oomph.units import GIB, MIB, TIB, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * GIB),
        ("24 gib", 24 * GIB),
        ("80GB", 80 * 10**9),
        ("512MiB", 512 * MIB),
        ("1.5TiB", TIB * 3 // 2),
        ("24G", 24 * GIB),
        ("1e3", 1000),
        ("7b", 7),
        (12345, 12345),
        (2.0, 2),
    ],
)
def test_sizes_are_read_as_written(text, size) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "24 bananas", "0", "-1GiB", "nan", "inf", "-inf", "0.5", "1..2GiB", "24GiB!"],
)
def test_sizes_that_cannot_be_meant_are_refused(text) -> None:
    with pytest.raises(BadInput):
        parse_bytes(text)


def test_more_than_a_pebibyte_is_taken_for_a_wrong_unit() -> None:
    assert parse_bytes("1024TiB") == 1024 * TIB
    with pytest.raises(BadInput, match="is the unit right"):
        parse_bytes("1025TiB")
    with pytest.raises(BadInput):
        parse_bytes("1e300TiB")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (24 * GIB, "24.00 GiB"),
        (150 * GIB, "150.0 GiB"),
        (2 * TIB, "2.00 TiB"),
        (-MIB, "-1.00 MiB"),
    ],
)
def test_sizes_are_written_with_three_or_four_digits(size, text) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize("size", [MIB, 10 * MIB, 3 * GIB, 24 * GIB, 150 * GIB])
def test_what_is_written_can_be_read(size) -> None:
    assert parse_bytes(format_bytes(size)) == size
