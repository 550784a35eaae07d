"""Fake tensors, which have a shape but no data; rehearsals run on them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException as DynamicOutputShapeException,
)
from torch._subclasses.fake_tensor import FakeCopyMode as FakeCopyMode
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

from oomph.torch_compat.private_name import PrivateName

NAMES = (
    PrivateName(
        "torch._subclasses.fake_tensor.FakeTensor",
        used_for="the tensors of a rehearsal",
        without_it="nothing can be rehearsed",
    ),
    PrivateName(
        "torch._subclasses.fake_tensor.FakeTensorMode",
        used_for="makes every tensor of a rehearsal a fake one",
        without_it="nothing can be rehearsed",
    ),
    PrivateName(
        "torch._subclasses.fake_tensor.FakeCopyMode",
        used_for="copies a real model as a fake one",
        without_it="no model that is built already can be rehearsed",
    ),
    PrivateName(
        "torch._subclasses.fake_tensor.DynamicOutputShapeException",
        used_for="tells an op whose result's size hangs on data from every other failure",
        without_it="what cannot be rehearsed for that reason ends in a raw error",
    ),
    PrivateName(
        "torch._subclasses.fake_tensor.in_kernel_invocation_manager",
        used_for="works out the result of a common op without a detour",
        without_it="`quick_fakes` does not work",
    ),
    PrivateName(
        "torch._subclasses.fake_tensor.log",
        used_for="keeps kernels that fail, and are known to, out of the user's log",
        without_it="rehearsals print tracebacks that mean nothing",
    ),
    PrivateName(
        "torch._subclasses.FakeTensor",
        used_for="libraries that look for fake tensors there find none in a rehearsal",
        without_it="libraries take other paths in a rehearsal than in a run",
    ),
    PrivateName(
        "torch.Tensor._make_subclass",
        used_for="makes a fake tensor like one that was made before",
        without_it="`quick_fakes` does not work; an estimate takes 7 % longer without",
    ),
    PrivateName(
        "torch._subclasses.fake_tensor.FakeTensorMode._allow_unsafe_data_ptr_access",
        used_for="whether such a tensor warns or fails where its memory is asked for",
        without_it="as without `_make_subclass`",
    ),
    PrivateName(
        "torch._C._set_throw_on_mutable_data_ptr",
        used_for="makes such a tensor fail where its memory is asked for",
        without_it="as without `_make_subclass`",
    ),
    PrivateName(
        "torch._C._set_warn_deprecated_on_mutable_data_ptr",
        used_for="makes such a tensor warn where its memory is asked for",
        without_it="as without `_make_subclass`",
    ),
    PrivateName(
        "torch._C._get_dispatch_mode",
        used_for="the fake mode around",
        without_it="no model can be copied for a rehearsal",
    ),
    PrivateName(
        "torch._C._TorchDispatchModeKey",
        used_for="tells the fake mode from other modes",
        without_it="no model can be copied for a rehearsal",
    ),
    PrivateName(
        "torch._guards.detect_fake_mode",
        used_for="whether a model is built for a rehearsal",
        without_it="models by name take their real memory on the host while they are rehearsed",
    ),
)

#: The module in which libraries look for the class of fake tensors.
HOME = torch._subclasses
#: The logger of kernels that fail on fake tensors.
log = fake_tensor.log

make_subclass = Tensor._make_subclass
in_kernel_invocation = fake_tensor.in_kernel_invocation_manager
allows_data_ptr = operator.attrgetter("_allow_unsafe_data_ptr_access")
throw_on_mutable_data_ptr = torch._C._set_throw_on_mutable_data_ptr
warn_on_mutable_data_ptr = torch._C._set_warn_deprecated_on_mutable_data_ptr

#: The active fake mode, or None.
current_fake_mode: Callable[[], Any] = functools.partial(
    torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE
)
#: The active fake mode, or that of a compiler that is tracing.
detect_fake_mode = torch._guards.detect_fake_mode
