"""What all tests of explaining have in common."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def nothing_left_over() -> None:
    """Models of other tests that nobody holds any more would be found among those alive."""
    gc.collect()
