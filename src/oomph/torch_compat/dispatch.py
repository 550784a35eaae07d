"""How PyTorch dispatches an op to a kernel, and the dispatch modes before that."""

from __future__ import annotations

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)

from oomph.torch_compat.private_name import PrivateName

NAMES = (
    PrivateName(
        "torch.utils._python_dispatch.TorchDispatchMode",
        used_for="sees every op that runs, with its arguments and its result",
        without_it="nothing can be rehearsed, proven or watched",
    ),
    PrivateName(
        "torch.utils._python_dispatch._disable_current_modes",
        used_for="reads and writes real tensors in the middle of a rehearsal",
        without_it="rehearsals take oomph's own work for the user's, or never end",
    ),
    PrivateName(
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
        used_for="finds tensors that are made of others",
        without_it="tensors such as quantized weights are moved or saved without what is inside",
    ),
    PrivateName(
        "torch._C.DispatchKey",
        used_for="names the keys below",
        without_it="no kernel can be replaced, and nothing can be rehearsed for a card",
    ),
    PrivateName(
        "torch._C.DispatchKeySet",
        used_for="several of these keys",
        without_it="autocast of a card cannot be rehearsed",
    ),
    PrivateName(
        "torch._C._SetExcludeDispatchKeyGuard",
        used_for="returns a kept result with the version that it had",
        without_it="blocks recomputed in part fail: autograd takes kept results for overwritten",
    ),
    PrivateName(
        "torch._C._ExcludeDispatchKeyGuard",
        used_for="an op that was cast is not cast again by the CPU's autocast",
        without_it="rehearsed autocast calls itself without end",
    ),
    PrivateName(
        "torch._C._ForceDispatchKeyGuard",
        used_for="numbers that PyTorch reads without calling modes are answered all the same",
        without_it="`torch.tensor([n[0], n[1]])` of fake tensors fails in a rehearsal",
    ),
    PrivateName(
        "torch._C._dispatch_get_all_op_names",
        used_for="finds the ops that the CPU's autocast casts",
        without_it="autocast of a card is rehearsed with casts of the CPU",
    ),
    PrivateName(
        "torch._C._dispatch_has_kernel_for_dispatch_key",
        used_for="tells ops with a kernel of their own for a key",
        without_it="autocast is rehearsed wrongly, and ops with fake kernels are recorded twice",
    ),
    PrivateName(
        "torch._C._dispatch_keyset_full_after",
        used_for="passes a call on to the kernels below a replaced one",
        without_it="replaced kernels call themselves without end",
    ),
    PrivateName(
        "torch._C._dispatch_tls_local_exclude_set",
        used_for="what is excluded around a number that is read",
        without_it="as without `_ForceDispatchKeyGuard`",
    ),
    PrivateName(
        "torch._C._dispatch_tls_local_include_set",
        used_for="what is included around a number that is read",
        without_it="as without `_ForceDispatchKeyGuard`",
    ),
    PrivateName(
        "torch._C._dispatch_tls_is_dispatch_key_excluded",
        used_for="whether PyTorch reads a number without calling modes",
        without_it="as without `_ForceDispatchKeyGuard`",
    ),
    PrivateName(
        "torch._ops.resolve_key",
        used_for="finds the kernel that PyTorch's tracer has for an op",
        without_it="other threads that compile beside a rehearsal trace other graphs",
    ),
    PrivateName(
        "torch.library._scoped_library",
        used_for="replaces kernels of PyTorch's own ops for a while",
        without_it="kernels stay replaced after a rehearsal",
    ),
)

disable_current_modes = _python_dispatch._disable_current_modes

DispatchKey = torch._C.DispatchKey
DispatchKeySet = torch._C.DispatchKeySet
SetExcludeDispatchKeyGuard = torch._C._SetExcludeDispatchKeyGuard
ExcludeDispatchKeyGuard = torch._C._ExcludeDispatchKeyGuard
ForceDispatchKeyGuard = torch._C._ForceDispatchKeyGuard

all_op_names = torch._C._dispatch_get_all_op_names
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
keys_below = torch._C._dispatch_keyset_full_after
excluded_keys = torch._C._dispatch_tls_local_exclude_set
included_keys = torch._C._dispatch_tls_local_include_set
is_key_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
resolve_key = torch._ops.resolve_key
scoped_library = torch.library._scoped_library
