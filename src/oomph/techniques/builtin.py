"""Loads the techniques that come with oomph: all modules here, those that are one register it."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

import oomph.techniques

for _module in iter_modules(oomph.techniques.__path__):
    import_module(f"oomph.techniques.{_module.name}")
