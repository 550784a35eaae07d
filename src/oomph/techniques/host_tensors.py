"""Host memory for what a step needs of each parameter: its state, its master, its gradient.

Tensors there have the parameter's shape and lie as it does, so that pieces of one fit pieces of the
other. What has no memory there at all may have a stand-in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from oomph.host.link import Link

_Key = TypeVar("_Key")


class StandIns(Generic[_Key]):
    """Tensors that show one number, which nobody takes for one, in place of what is elsewhere."""

    def __init__(self) -> None:
        self._stand_ins: dict[_Key, Tensor] = {}
        #: By the storage of a stand-in, which is never freed before this.
        self._stands_for: dict[int, _Key] = {}

    def of(self, key: _Key, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The stand-in for this, always the same."""
        if key not in self._stand_ins:
            number = no_number(dtype, torch.device("cpu"))
            self._stand_ins[key] = number.expand(shape)
            self._stands_for[number.untyped_storage()._cdata] = key
        return self._stand_ins[key]

    def find(self, tensor: Tensor) -> _Key | None:
        """What a tensor stands for, if it is one of these."""
        return self._stands_for.get(tensor.untyped_storage()._cdata)


def no_number(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A NaN, where a type has one: whoever looks at it sees that something is wrong."""
    nothing = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), nothing, dtype=torch.float32, device=device).to(dtype)


def host_tensor(link: Link, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Room on the host for a tensor like this one."""
    dtype = dtype or like.dtype
    memory = link.host_memory(like.numel() * dtype.itemsize)
    if not like.numel():
        return memory.view(dtype).view(like.shape)
    # Only where it must be: to a rehearsal, a tensor like one of the GPU is memory of the GPU.
    is_plain = like.is_contiguous()
    stride = like.stride() if is_plain else torch.empty_like(like, device="meta").stride()
    return memory.view(dtype).as_strided(like.shape, stride)


def gpu_like(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Room on the GPU for a tensor, to be computed with."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=device
    )


def to_gpu_now(link: Link, tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host, on the GPU from now on."""
    there = gpu_like(tensor, device)
    link.to_gpu(tensor, there).wait()
    return there


def brought_home(
    link: Link, tensor: Tensor, home: torch.device, computes_on: torch.device
) -> Tensor:
    """A tensor of the host where it was before; what was in host memory beside a GPU stays."""
    if home.type == "cpu" and computes_on.type != "cpu":
        return tensor
    return to_gpu_now(link, tensor, home)


def to_host_now(link: Link, tensor: Tensor) -> Tensor:
    """A tensor of the GPU, on the host from now on."""
    here = host_tensor(link, tensor)
    link.to_host(tensor.detach(), here).finish()
    return here
