"""Host memory for what a step needs of each parameter: its state, its master, its gradient.

Tensors there have the parameter's shape and strides, so that pieces of one match pieces of the
other. A tensor that is kept elsewhere may have a stand-in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from oomph.memory.link import Link
from oomph.torch_compat.storages import cdata_of
from oomph.torch_compat.tensors import indices_of, values_of

_Key = TypeVar("_Key")


class StandIns(Generic[_Key]):
    """Placeholders for tensors kept elsewhere: a single NaN (or 0) expanded to the shape."""

    def __init__(self) -> None:
        self._stand_ins: dict[_Key, Tensor] = {}
        #: By a stand-in's storage, which lives as long as this object.
        self._stands_for: dict[int, _Key] = {}

    def of(self, key: _Key, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The stand-in for this key, always the same tensor."""
        if key not in self._stand_ins:
            number = no_number(dtype, torch.device("cpu"))
            self._stand_ins[key] = number.expand(shape)
            self._stands_for[cdata_of(number.untyped_storage())] = key
        return self._stand_ins[key]

    def find(self, tensor: Tensor) -> _Key | None:
        """The key that a tensor stands for, if it is a stand-in."""
        return self._stands_for.get(cdata_of(tensor.untyped_storage()))


def bytes_of(tensor: Tensor) -> int:
    """Bytes that a tensor takes; for a sparse one, its values and indices."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    if tensor.layout is torch.sparse_coo:
        return indices_of(tensor).nbytes + values_of(tensor).nbytes
    return tensor.numel() * tensor.element_size()


def no_number(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A NaN if the type has one, else 0: a NaN makes an accidental read obvious."""
    nothing = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), nothing, dtype=torch.float32, device=device).to(dtype)


def host_tensor(link: Link, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised host memory for a tensor like this one."""
    dtype = dtype or like.dtype
    memory = link.host_memory(like.numel() * dtype.itemsize)
    if not like.numel():
        return memory.view(dtype).view(like.shape)
    # `empty_like` only if needed: a rehearsal counts a tensor like a GPU tensor as GPU memory.
    is_plain = like.is_contiguous()
    stride = like.stride() if is_plain else torch.empty_like(like, device="meta").stride()
    return memory.view(dtype).as_strided(like.shape, stride)


def gpu_like(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised GPU memory for a tensor."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=device
    )


def to_gpu_now(link: Link, tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the GPU; later GPU work waits for the copy."""
    there = gpu_like(tensor, device)
    link.to_gpu(tensor, there).wait()
    return there


def brought_home(
    link: Link, tensor: Tensor, home: torch.device, computes_on: torch.device
) -> Tensor:
    """Move a host tensor back to `home`; one that was in host memory beside a GPU stays there."""
    if home.type == "cpu" and computes_on.type != "cpu":
        return tensor
    return to_gpu_now(link, tensor, home)


def to_host_now(link: Link, tensor: Tensor) -> Tensor:
    """Copy a GPU tensor to the host and wait until it is there."""
    here = host_tensor(link, tensor)
    link.to_host(tensor.detach(), here).finish()
    return here
