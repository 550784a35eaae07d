"""Products of groups of matrices, as mixtures of experts compute them.

PyTorch's fake kernel accepts only bf16; the CPU's and CUDA's kernels accept other types, too.
"""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_product(
    one: Tensor,
    other: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """An output shaped like that of `torch._grouped_mm`, whatever the values of the offsets."""
    rows, columns = one.shape[-2], other.shape[-1]
    dtype = out_dtype or one.dtype
    if one.dim() != other.dim():
        return one.new_empty(rows, columns, dtype=dtype)
    assert offsets is not None or one.dim() == 3
    groups = one.shape[0] if one.dim() == 3 or offsets is None else offsets.shape[0]
    return one.new_empty(groups, rows, columns, dtype=dtype)
