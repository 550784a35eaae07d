"""Storages: the memory that tensors share."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from oomph.torch_compat.private_name import PrivateName

NAMES = (
    PrivateName(
        "torch.UntypedStorage._cdata",
        used_for="tells which tensors share memory, fake ones too",
        without_it="memory that tensors share is counted twice, and saved twice",
    ),
    PrivateName(
        "torch.Generator._cdata",
        used_for="tells random streams apart",
        without_it="streams that a forward draws from are not put back",
    ),
    PrivateName(
        "torch._C._storage_Use_Count",
        used_for="how many tensors share a storage",
        without_it="sums in place are counted as new memory; shared weights are stepped too early",
    ),
    PrivateName(
        "torch._C._construct_storage_from_data_pointer",
        used_for="shows pinned memory of the host to kernels of a card",
        without_it="optimizers on the host read and write over slower copies, or not at all",
    ),
)

#: A key that is the same for all objects of one storage or of one generator while it lives; also
#: for storages without an address.
cdata_of: Callable[[Any], int] = operator.attrgetter("_cdata")
storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
storage_at: Callable[..., Any] = torch._C._construct_storage_from_data_pointer
