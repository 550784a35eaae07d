"""A real model, its optimizer and their state, copied as fake tensors, wherever they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor


class HostCopyMode(FakeCopyMode):
    """Copies become fake tensors of the CPU: a rehearsal keeps to itself what is on the GPU."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = super().__torch_function__(func, types, args, kwargs)
        if func is torch._C.TensorBase.clone:
            return _on_host(out)
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            out = memo[id(tensor)] = _on_host(out)
        return out


def _on_host(tensor: Any) -> Any:
    if not isinstance(tensor, FakeTensor) or tensor.fake_device.type == "cpu":
        return tensor
    twin: Tensor = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
    )
    return twin.requires_grad_(tensor.requires_grad)
