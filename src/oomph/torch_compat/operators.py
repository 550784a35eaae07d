"""PyTorch's ops, as a dispatch mode sees them.

Some ops only have names that begin with an underscore. oomph's rules name them directly, for
example `aten._to_copy`; all of them are listed here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oomph.torch_compat.private_name import PrivateName

NAMES = (
    PrivateName(
        "torch._ops.OpOverload",
        used_for="tells ops from other functions in graphs and dispatch modes",
        without_it="nothing compiled can be rehearsed, and no work can be timed",
    ),
    PrivateName(
        "torch._ops.OpOverload._schema",
        used_for="which arguments an op writes to, and which it returns",
        without_it="writes are missed: memory is counted wrongly, and no batch can be split",
    ),
    PrivateName(
        "torch._ops.OpOverload._overloadpacket",
        used_for="rules that hold for all overloads of an op",
        without_it="ops are timed as if they were others",
    ),
    PrivateName(
        "torch._ops.OpOverload._dispatch_cache",
        used_for="a replaced kernel is called from the next call on",
        without_it="kernels are replaced too late, and put back too late",
    ),
    PrivateName(
        "torch._scaled_mm",
        used_for="multiplies in FP8",
        without_it="FP8 products and their measurement fail",
    ),
)

OpOverload = torch._ops.OpOverload

#: An op's arguments and results, and which of them it writes to.
schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")
#: Attribute of an op: its overload packet. Functions that are no ops lack it.
OVERLOADS = "_overloadpacket"
scaled_mm: Callable[..., Tensor] = torch._scaled_mm


def forget_kernels(op: Any) -> None:
    """Make PyTorch look up an op's kernels again for each dispatch key."""
    op._dispatch_cache.clear()


#: Ops that oomph's rules name. If one is missing, oomph cannot be imported.
OPS = (
    "_amp_foreach_non_finite_check_and_unscale_",
    "_ctc_loss",
    "_cudnn_rnn",
    "_cudnn_rnn_backward",
    "_cudnn_rnn_flatten_weight",
    "_embedding_bag",
    "_foreach_add_",
    "_foreach_norm",
    "_fused_adam_",
    "_fused_adamw_",
    "_fused_rms_norm",
    "_fused_sgd_",
    "_grouped_mm",
    "_is_all_true",
    "_is_any_true",
    "_local_scalar_dense",
    "_log_softmax",
    "_log_softmax_backward_data",
    "_pack_padded_sequence",
    "_safe_softmax",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_softmax",
    "_softmax_backward_data",
    "_to_copy",
    "_unsafe_view",
)
