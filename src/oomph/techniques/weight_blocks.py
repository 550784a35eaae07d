"""Blocks whose weights are moved as one: which they are, and where each weight is in their memory.

A block's weights lie one after the other in one piece of memory, the same way on the host and on
the GPU, so that one copy brings them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from oomph.errors import BadInput
from oomph.host.link import Copy

#: Weights begin at multiples of so many bytes, where kernels read them fastest.
_ALIGNED = 256


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a parameter is in its block's memory, and how it lies there."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, parameter: Tensor, offset: int) -> Place:
        """For a parameter that begins at this byte."""
        stride = torch.empty_like(parameter, device="meta").stride()
        return cls(offset=offset, dtype=parameter.dtype, shape=parameter.shape, stride=stride)

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Where the next parameter begins."""
        return self.offset + -(-self.nbytes // _ALIGNED) * _ALIGNED

    @property
    def span(self) -> range:
        """The bytes of the block's memory that it has."""
        return range(self.offset, self.offset + self.nbytes)

    @property
    def like(self) -> Tensor:
        """A tensor without numbers that lies as the parameter does."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    def byte_of(self, element: int) -> int:
        """Where in the block's memory one of its elements begins."""
        return self.offset + element * self.dtype.itemsize

    def bytes_in(self, memory: Tensor) -> Tensor:
        """Its part of the block's memory."""
        return memory[self.offset : self.offset + self.nbytes]

    def flat(self, numbers: Tensor) -> Tensor:
        """A parameter's numbers, one behind the other as they lie in the block's memory."""
        numbers = numbers.detach()
        if numbers.stride() != self.stride:
            lying = torch.empty_strided(
                self.shape, self.stride, dtype=self.dtype, device=numbers.device
            )
            numbers = lying.copy_(numbers)
        return numbers.as_strided((numbers.numel(),), (1,))

    def view(self, memory: Tensor) -> Tensor:
        """The parameter in its block's memory, here or on the host, of bytes or of numbers."""
        numbers = memory if memory.dtype == self.dtype else memory.view(self.dtype)
        begins = numbers.storage_offset() + self.offset // self.dtype.itemsize
        return numbers.as_strided(self.shape, self.stride, begins)


#: A piece of memory as numbers of a type: there are many weights, and making views takes time.
Numbers = dict[torch.dtype, Tensor]


def numbers_in(memory: Tensor, dtype: torch.dtype, known: Numbers) -> Tensor:
    """Memory as numbers of a type; `known` are those of the same memory so far."""
    if dtype not in known:
        known[dtype] = memory.view(dtype)
    return known[dtype]


@dataclass(kw_only=True, eq=False)
class Unit:
    """A block, and where its weights are."""

    path: str
    module: nn.Module
    places: dict[nn.Parameter, Place]
    nbytes: int
    slab: Tensor
    """On the host: the weights of this block that no earlier one has as well; none if they are on
    the disk."""
    cold_bytes: int = 0
    """On the disk: bytes of those weights, which are the first of the block."""
    borrowed: list[tuple[Tensor, Place]] = field(default_factory=list)
    """The bytes of weights that an earlier block has on the host, and their places in this one."""
    memory: Tensor | None = None
    """On the GPU, while the block is here or on its way."""
    numbers: Numbers = field(default_factory=dict)
    """The same memory, by the types that were asked for."""
    copies: list[Copy] = field(default_factory=list)
    """Those that last brought it to the GPU from the host."""
    from_disk: list[Copy] = field(default_factory=list)
    """And those from the disk, until they were waited for."""
    puts: int = 0
    """How many puts of weights on the disk there had been by then."""
    is_here: bool = False
    """Whether the computing stream was told to wait for them."""
    versions: dict[nn.Parameter, int] = field(default_factory=dict)
    """Which of the host's numbers came: how often they had been changed by then."""
    is_outdated: bool = False
    """Whether the host has other numbers by now, and only a backward that runs wants these."""

    def is_cold(self, parameter: nn.Parameter) -> bool:
        """Whether the weights of a parameter are on the disk."""
        return self.places[parameter].offset < self.cold_bytes

    def parameter_at(self, offset: int) -> nn.Parameter:
        """The parameter that this byte of the memory belongs to."""
        *_, found = (p for p, place in self.places.items() if place.offset <= offset)
        return found


def lay_out(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Place]:
    """Places for them, one after the other."""
    places: dict[nn.Parameter, Place] = {}
    end = 0
    for parameter in parameters:
        places[parameter] = Place.of(parameter, end)
        end = places[parameter].end
    return places


def end_of(places: Iterable[Place]) -> int:
    """Bytes of the memory that has all of these places."""
    return max((place.end for place in places), default=0)


def find_blocks(model: nn.Module, paths: Sequence[str]) -> dict[str, nn.Module]:
    """The modules at these paths, none of which is a part of another."""
    found: dict[str, nn.Module] = {}
    for path in paths:
        try:
            found[path] = model.get_submodule(path)
        except AttributeError:
            raise BadInput(f"{type(model).__name__} has no block {path}") from None
    for path, module in found.items():
        inside = set(module.modules()) - {module}
        if nested := [other for other, block in found.items() if block in inside]:
            raise BadInput(f"{nested[0]} is a part of {path}: stream one or the other")
    return found


def streamed_by(model: nn.Module, blocks: Iterable[nn.Module]) -> set[nn.Parameter]:
    """The parameters that only blocks use."""
    inside = {module for block in blocks for module in block.modules()}
    outside = {p for m in model.modules() if m not in inside for p in m.parameters(recurse=False)}
    streamed = {p for module in inside for p in module.parameters(recurse=False)} - outside
    if not streamed:
        raise BadInput("the blocks have no weights of their own: there is nothing to stream")
    if plain := [p for p in streamed if is_traceable_wrapper_subclass(p)]:
        raise BadInput(
            f"a weight {list(plain[0].shape)} is a {type(plain[0]).__name__}, whose memory cannot"
            " be streamed: leave its block on the GPU"
        )
    return streamed


def device_of(parameters: Iterable[nn.Parameter]) -> torch.device:
    """Where they all are."""
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        raise BadInput("the blocks are on several devices: name the one that they are to run on")
    return devices.pop()
