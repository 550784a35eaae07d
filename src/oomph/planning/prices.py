"""What an hour of a card costs, from a table that the user can edit (`prices.toml`)."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from oomph.errors import BadInput
from oomph.gpus import find_gpu

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Dollars an hour by the card's name in the catalogue."""

    source: str
    """Where they are from, in words."""
    dollars_per_hour: Mapping[str, float]


def example_prices() -> Prices:
    """The table that comes with oomph: examples, whose date it names."""
    text = resources.files("oomph.planning").joinpath("prices.toml").read_text(encoding="utf-8")
    date = tomllib.loads(text)["date"]
    return parse_prices(text, f"examples of {date}: give your own with --prices")


def load_prices(path: str | Path) -> Prices:
    """The user's table."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot read the prices {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput(f"the prices {path} are not text") from None
    return parse_prices(text, str(path))


def parse_prices(text: str, source: str) -> Prices:
    """Prices from the text of a table; `BadInput` names the entry that is wrong."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"the prices {source} are not TOML: {error}") from None
    if document.get("schema") != SCHEMA:
        raise BadInput(f"the prices {source} have schema {document.get('schema')!r}, not {SCHEMA}")
    table = document.get("dollars_per_hour")
    if not isinstance(table, dict) or not table:
        raise BadInput(f"the prices {source} name no card under [dollars_per_hour]")
    for name, price in table.items():
        number = isinstance(price, int | float) and not isinstance(price, bool)
        if not number or not math.isfinite(price) or price <= 0:
            raise BadInput(f"the prices {source}: an hour of {name} cannot cost {price!r} dollars")
    by_name = {find_gpu(name).name: float(price) for name, price in table.items()}
    return Prices(source=source, dollars_per_hour=by_name)
