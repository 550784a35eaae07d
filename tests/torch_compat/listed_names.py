"""The private names of PyTorch that `oomph.torch_compat` lists."""

from __future__ import annotations

import importlib
import pkgutil

from oomph import torch_compat
from oomph.torch_compat.private_name import PrivateName


def _listed() -> list[PrivateName]:
    areas = [area.name for area in pkgutil.iter_modules(torch_compat.__path__)]
    modules = [importlib.import_module(f"oomph.torch_compat.{area}") for area in areas]
    return [name for module in modules for name in getattr(module, "NAMES", ())]


NAMES = _listed()
