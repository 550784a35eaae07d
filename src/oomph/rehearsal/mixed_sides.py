"""Ops that take tensors of one device only: a rehearsal refuses what the GPU would refuse.

Below, all fake tensors are on the CPU, so their kernels accept a weight on the host beside a batch
on the GPU. A real run would stop at such an op. Without this check, a rehearsal that failed to
follow a tensor to the GPU would continue without it, and predict too little memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

#: Ops that need one device, besides elementwise ops. Other ops are not checked: some take lengths,
#: indices or offsets on the host by design.
_ONE_DEVICE = {
    aten.addbmm,
    aten.addmm,
    aten.addmv,
    aten.addr,
    aten.baddbmm,
    aten.bmm,
    aten.cat,
    aten.convolution,
    aten.convolution_backward,
    aten.dot,
    aten.embedding,
    aten.gather,
    aten.index_add,
    aten.index_select,
    aten.linear,
    aten.mm,
    aten.mv,
    aten.native_batch_norm,
    aten.native_group_norm,
    aten.native_layer_norm,
    aten.nll_loss2d_forward,
    aten.nll_loss_forward,
    aten.scatter,
    aten.scatter_add,
    aten.scatter_add_,
}


def refuse_mixed(func: Any, on_host: Sequence[Tensor]) -> None:
    """Raise PyTorch's error if the op needs one device but also got these host tensors."""
    if not _takes_one_device(func):
        return
    for tensor in on_host:
        # A scalar on the host may be combined with GPU tensors, and so may an empty tensor.
        if tensor.dim() and tensor.numel():
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices,"
                f" cuda:0 and cpu! ({func.name().removeprefix('aten::')} was given a tensor of the"
                f" CPU, of shape {tuple(tensor.shape)}, beside one of the GPU)"
            )


@functools.cache
def _takes_one_device(func: Any) -> bool:
    if func.overloadpacket in _ONE_DEVICE:
        return True
    return (
        torch.Tag.pointwise in func.tags
        and torch.Tag.nondeterministic_seeded not in func.tags
        and not func.name().startswith(("aten::_foreach_", "aten::copy"))
    )
