"""The active transforms of `torch.func`, and their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oomph.torch_compat.private_name import PrivateName

NAMES = (
    PrivateName(
        "torch._C._functorch.peek_interpreter_stack",
        used_for="whether a transform runs what runs now",
        without_it="models that use `torch.func` fail with activations or weights on the host",
    ),
    PrivateName(
        "torch._C._functorch.is_functorch_wrapped_tensor",
        used_for="finds tensors of a transform, which have no memory of their own",
        without_it="models that use `torch.func` cannot be rehearsed",
    ),
    PrivateName(
        "torch._C._functorch.get_unwrapped",
        used_for="the tensor that such a one stands for",
        without_it="models that use `torch.func` cannot be rehearsed",
    ),
)

interpreter_stack: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
unwrapped: Callable[[Tensor], Tensor] = torch._C._functorch.get_unwrapped
