"""The norm of all gradients, each of which is measured as soon as it is complete.

Each gradient is measured with the op that `clip_grad_norm_` would use, and the norms are combined
in its order, so the result is bitwise the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oomph.torch_compat.optimizers import foreach_norm, group_tensors, has_foreach


@torch.no_grad()
def gradient_norm(gradient: Tensor) -> Tensor:
    """The norm of one gradient, as `clip_grad_norm_` measures it."""
    if has_foreach([gradient], gradient.device):
        return foreach_norm([gradient], 2.0)[0]
    norm: Tensor = torch.linalg.vector_norm(gradient, 2.0)
    return norm


@torch.no_grad()
def clip_coefficient(norms: Sequence[tuple[Tensor, torch.dtype]], max_norm: float) -> Tensor:
    """The factor by which `clip_grad_norm_` multiplies gradients of these norms and types."""
    kinds = _in_order([dtype for _, dtype in norms], norms[0][0].device)
    ordered = [norm for kind in kinds for norm, dtype in norms if dtype == kind]
    total = torch.linalg.vector_norm(torch.stack(ordered), 2.0)
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)


def _in_order(dtypes: Sequence[torch.dtype], device: torch.device) -> list[torch.dtype]:
    """Dtypes in the order in which PyTorch groups gradients of these dtypes."""
    kinds = list(dict.fromkeys(dtypes))
    if len(kinds) == 1:
        return kinds
    one_of_each: list[Tensor | None] = [torch.empty(0, dtype=d, device=device) for d in kinds]
    return [dtype for _, dtype in group_tensors([one_of_each])]
