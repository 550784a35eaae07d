"""What `oomph` promises to have is there."""

from __future__ import annotations

import pkgutil
from importlib import import_module

import pytest

import oomph


@pytest.mark.parametrize("home", oomph._HOMES)
def test_every_public_name_is_where_it_is_looked_for(home: str) -> None:
    module = import_module(f"oomph.{home}")
    for name in oomph._HOMES[home]:
        assert hasattr(module, name), name
        assert name in oomph.__all__


def test_no_public_name_is_that_of_a_module() -> None:
    modules = {module.name for module in pkgutil.iter_modules(oomph.__path__)}
    assert not modules & set(oomph.__all__), "importing the module would hide the function"
