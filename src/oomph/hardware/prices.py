"""The hourly price of GPUs, from a table that the user can edit (`prices.toml`)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from oomph.errors import BadInput
from oomph.files.plain_toml import MOST_BYTES, parse_toml
from oomph.files.reading import read_regular
from oomph.hardware import find_gpu
from oomph.quoting import brief

SCHEMA = 1
_MOST_DOLLARS = 1e9


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Dollars per hour by the GPU's name in the catalogue."""

    source: str
    """Where the prices are from."""
    dollars_per_hour: Mapping[str, float]


def example_prices() -> Prices:
    """The table included with oomph: examples with a date."""
    text = resources.files("oomph.hardware").joinpath("prices.toml").read_text(encoding="utf-8")
    date = tomllib.loads(text)["date"]
    return parse_prices(text, f"examples of {date}: give your own with --prices")


def load_prices(path: str | Path) -> Prices:
    """Load the user's table."""
    try:
        text = read_regular(path, most=MOST_BYTES).decode("utf-8")
    except OSError as error:
        raise BadInput(f"cannot read the prices {str(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput(f"the prices {path} are not text") from None
    return parse_prices(text, str(path))


def parse_prices(text: str, source: str) -> Prices:
    """Parse the text of a price table; `BadInput` names a wrong entry."""
    try:
        document = parse_toml(text)
    except ValueError as error:
        raise BadInput(f"the prices {source} are not TOML: {error}") from None
    if document.get("schema") != SCHEMA:
        raise BadInput(
            f"the prices {source} have schema {brief(document.get('schema'))}, not {SCHEMA}"
        )
    table = document.get("dollars_per_hour")
    if not isinstance(table, dict) or not table:
        raise BadInput(f"the prices {source} name no card under [dollars_per_hour]")
    for name, price in table.items():
        number = isinstance(price, int | float) and not isinstance(price, bool)
        if not number or not 0 < price < _MOST_DOLLARS:
            raise BadInput(
                f"the prices {source}: an hour of {name} cannot cost {brief(price)} dollars"
            )
    by_name = {find_gpu(name).name: float(price) for name, price in table.items()}
    return Prices(source=source, dollars_per_hour=by_name)
