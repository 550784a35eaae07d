"""A table of prices: what it says, and what it may not say."""

from __future__ import annotations

import pytest

from oomph.errors import BadInput, UnknownName
from oomph.hardware import known_gpus
from oomph.hardware.prices import example_prices, load_prices, parse_prices

HEAD = "schema = 1\n[dollars_per_hour]\n"


def test_the_shipped_prices_are_of_known_cards_and_say_that_they_are_examples() -> None:
    prices = example_prices()
    assert prices.dollars_per_hour.keys() <= known_gpus().keys()
    assert "h200" in prices.dollars_per_hour
    assert prices.source.startswith("examples of 20")
    assert "--prices" in prices.source


def test_a_file_may_spell_cards_as_torch_does(tmp_path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(HEAD + '"NVIDIA GeForce RTX 4090" = 0.4\nh200 = 3\n')
    prices = load_prices(file)
    assert prices.dollars_per_hour == {"rtx-4090": 0.4, "h200": 3.0}
    assert prices.source == str(file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h200 =", "not TOML"),
        ("[dollars_per_hour]\nh200 = 3", "schema None, not 1"),
        ("schema = 1", r"no card under \[dollars_per_hour\]"),
        (HEAD, r"no card under \[dollars_per_hour\]"),
        (HEAD + "h200 = 0", "h200 cannot cost 0 dollars"),
        (HEAD + "h200 = -1", "h200 cannot cost -1 dollars"),
        (HEAD + "h200 = nan", "h200 cannot cost nan dollars"),
        (HEAD + 'h200 = "3"', "h200 cannot cost '3' dollars"),
        (HEAD + "h200 = true", "h200 cannot cost True dollars"),
    ],
)
def test_a_malformed_table_is_refused(text, words) -> None:
    with pytest.raises(BadInput, match=words):
        parse_prices(text, "mine.toml")


def test_an_unknown_card_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="rtx-4090"):
        parse_prices(HEAD + "rtx-4091 = 1", "mine.toml")


def test_a_file_that_cannot_be_read_is_refused(tmp_path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        load_prices(tmp_path / "missing.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="are not text"):
        load_prices(tmp_path / "bytes.toml")
