"""A tensor's version, hooks and internals."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch._prims_common
from torch import Tensor

from oomph.torch_compat.private_name import PrivateName

NAMES = (
    PrivateName(
        "torch._C.TensorBase",
        used_for="asks a tensor past what its class replaced",
        without_it="reading a fake tensor's numbers, or a chunked loss's device, never ends",
    ),
    PrivateName(
        "torch.Tensor._version",
        used_for="whether a tensor was written to since it was looked at",
        without_it="changes to weights or optimizer state are lost, or copied where there are none",
    ),
    PrivateName(
        "torch._C._autograd._unsafe_set_version_counter",
        used_for="autograd believes that nobody wrote to a tensor of which there is a copy",
        without_it="blocks that write to their input cannot be recomputed",
    ),
    PrivateName(
        "torch.Tensor._is_view",
        used_for="tells a view from a tensor of its own",
        without_it="shuffled positions and cast weights are counted wrongly",
    ),
    PrivateName(
        "torch.Tensor._use_count",
        used_for="whether somebody else holds a gradient that is summed up",
        without_it="sums that autograd makes in place are counted as new memory",
    ),
    PrivateName(
        "torch.Tensor._indices",
        used_for="the positions of a sparse gradient",
        without_it="sparse gradients do not reach the optimizer on the host",
    ),
    PrivateName(
        "torch.Tensor._values",
        used_for="the numbers of a sparse gradient",
        without_it="sparse gradients do not reach the optimizer on the host",
    ),
    PrivateName(
        "torch.Tensor._make_wrapper_subclass",
        used_for="logits that have a shape and are not computed yet",
        without_it="a loss cannot be chunked",
    ),
    PrivateName(
        "torch._C._swap_tensor_impl",
        used_for="what `Module.to` swaps, for fake tensors",
        without_it="`Module.to` cannot be rehearsed",
    ),
    PrivateName(
        "torch._debug_has_internal_overlap",
        used_for="finds buffers whose elements share memory, which nobody can write to",
        without_it="steps of models with expanded buffers fail",
    ),
    PrivateName(
        "torch._prims_common.suggest_memory_format",
        used_for="whether images lie channels last",
        without_it="convolutions are timed in the wrong layout",
    ),
    PrivateName(
        "torch.Tensor._grad",
        used_for="reading it does not count as a use of a watched tensor",
        without_it="weights are fetched too early",
    ),
    PrivateName(
        "torch.Tensor._base",
        used_for="reading it does not count as a use of a watched tensor",
        without_it="weights are fetched too early",
    ),
    PrivateName(
        "torch.Tensor._cdata",
        used_for="reading it does not count as a use of a watched tensor",
        without_it="weights are fetched too early",
    ),
    PrivateName(
        "torch.Tensor._backward_hooks",
        used_for="finds hooks on gradients",
        without_it="hooks run once for each part of a batch rather than once",
    ),
    PrivateName(
        "torch.Tensor._post_accumulate_grad_hooks",
        used_for="finds hooks on summed gradients",
        without_it="hooks run once for each part of a batch rather than once",
    ),
)

#: The base class of `Tensor`, whose methods no subclass has overridden.
TensorBase = torch._C.TensorBase

#: A tensor's version: how often it was written to in place.
version_of: Callable[[Tensor], int] = operator.attrgetter("_version")
set_versions: Callable[..., None] = torch._C._autograd._unsafe_set_version_counter

is_view: Callable[[Tensor], bool] = Tensor._is_view
use_count: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]
indices_of: Callable[[Tensor], Tensor] = Tensor._indices
values_of: Callable[[Tensor], Tensor] = Tensor._values

make_wrapper_subclass: Callable[..., Any] = Tensor._make_wrapper_subclass
swap_contents: Callable[[Tensor, Tensor], None] = torch._C._swap_tensor_impl
internal_overlap: Callable[[Tensor], int] = torch._debug_has_internal_overlap
suggest_memory_format = torch._prims_common.suggest_memory_format

#: Attribute names, for code that accesses them by name.
VERSION = "_version"
GRADIENT = "_grad"
BASE = "_base"
CDATA = "_cdata"
BACKWARD_HOOKS = "_backward_hooks"
AFTER_ACCUMULATION = "_post_accumulate_grad_hooks"
