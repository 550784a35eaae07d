"""Cells that are known to fail, and the defect that each shows; until it is mended, they must."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

_LIST = Path(__file__).with_name("known_failures.txt")


@functools.cache
def _known() -> dict[str, str]:
    lines = [line.split(maxsplit=1) for line in _LIST.read_text(encoding="utf-8").splitlines()]
    return {words[0]: words[1] for words in lines if words and not words[0].startswith("#")}


def known_failure(cell: str) -> list[pytest.MarkDecorator]:
    """The mark of a cell that is on the list."""
    why = _known().get(cell)
    return [pytest.mark.xfail(strict=True, reason=why)] if why else []
