"""Device memory of prefetched batches."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from oomph.jobs.job import check_count
from oomph.torch_compat.pytree import tree_leaves

#: The allocator's rounding unit.
ROUND = 512


def prefetched_bytes(batch: Any, depth: int) -> int:
    """Device memory of `depth` batches like this one, as PyTorch's allocator counts it.

    Subtract it from the budget of a plan whose run prefetches that many.
    """
    if not depth:
        return 0
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    one = sum(-(-leaf.numel() * leaf.element_size() // ROUND) * ROUND for leaf in leaves)
    return check_count("the depth of prefetching", depth) * one
