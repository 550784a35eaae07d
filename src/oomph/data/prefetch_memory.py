"""What batches cost that are on the device before their step."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from oomph.job import check_count

#: The allocator's unit.
ROUND = 512


def prefetched_bytes(batch: Any, depth: int) -> int:
    """Device memory of `depth` batches like this one, as PyTorch's allocator counts it.

    Take it off the budget of a plan whose run prefetches so deep.
    """
    if not depth:
        return 0
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    one = sum(-(-leaf.numel() * leaf.element_size() // ROUND) * ROUND for leaf in leaves)
    return check_count("the depth of prefetching", depth) * one
