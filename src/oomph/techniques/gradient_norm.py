"""The norm of all gradients, of which each is measured as soon as it is complete.

Each gradient is measured by the op that `clip_grad_norm_` would use, and their norms are put
together in its order: the sum has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._foreach_utils import (
    _group_tensors_by_device_and_dtype,
    _has_foreach_support,
)


@torch.no_grad()
def gradient_norm(gradient: Tensor) -> Tensor:
    """The norm of one gradient, as `clip_grad_norm_` measures it."""
    if _has_foreach_support([gradient], gradient.device):
        return torch._foreach_norm([gradient], 2.0)[0]
    norm: Tensor = torch.linalg.vector_norm(gradient, 2.0)
    return norm


@torch.no_grad()
def clip_coefficient(norms: Sequence[tuple[Tensor, torch.dtype]], max_norm: float) -> Tensor:
    """What `clip_grad_norm_` multiplies gradients of these norms and types with."""
    kinds = _in_order([dtype for _, dtype in norms], norms[0][0].device)
    ordered = [norm for kind in kinds for norm, dtype in norms if dtype == kind]
    total = torch.linalg.vector_norm(torch.stack(ordered), 2.0)
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)


def _in_order(dtypes: Sequence[torch.dtype], device: torch.device) -> list[torch.dtype]:
    """Gradients of one type follow each other; which type is first is PyTorch's affair."""
    kinds = list(dict.fromkeys(dtypes))
    if len(kinds) == 1:
        return kinds
    one_of_each: list[Tensor | None] = [torch.empty(0, dtype=d, device=device) for d in kinds]
    return [dtype for _, dtype in _group_tensors_by_device_and_dtype([one_of_each])]
