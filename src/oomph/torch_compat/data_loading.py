"""How a DataLoader starts an epoch."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from oomph.torch_compat.private_name import PrivateName

NAMES = (
    PrivateName(
        "torch.utils.data.DataLoader._get_iterator",
        used_for="loads in the process that is rehearsed, without workers",
        without_it="scripts whose loaders have workers cannot be rehearsed",
    ),
)

#: The method of `DataLoader` that starts an epoch.
GET_ITERATOR = "_get_iterator"
get_iterator: Any = DataLoader._get_iterator
