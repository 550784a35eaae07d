"""Blocks whose weights are moved together, and the layout of each block's memory.

A block's weights lie one after the other in one piece of memory, in the same layout on the host and
on the GPU, so that one copy moves them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from oomph.errors import BadInput
from oomph.memory.link import Copy
from oomph.techniques.watched_tensors import own_work
from oomph.torch_compat.dispatch import is_traceable_wrapper_subclass
from oomph.torch_compat.modules import own_parameters
from oomph.torch_compat.storages import cdata_of

#: Weights begin at multiples of this many bytes, where kernels read them fastest.
_ALIGNED = 256


@dataclass(frozen=True, kw_only=True)
class Place:
    """A parameter's place and layout in its block's memory."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, parameter: Tensor, offset: int) -> Place:
        """The place of a parameter that begins at this byte."""
        stride = torch.empty_like(parameter, device="meta").stride()
        return cls(offset=offset, dtype=parameter.dtype, shape=parameter.shape, stride=stride)

    @property
    def nbytes(self) -> int:
        """Size of the parameter in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Where the next parameter begins."""
        return self.offset + -(-self.nbytes // _ALIGNED) * _ALIGNED

    @property
    def span(self) -> range:
        """The byte range of the parameter in the block's memory."""
        return range(self.offset, self.offset + self.nbytes)

    @property
    def like(self) -> Tensor:
        """A tensor without data that has the parameter's shape and strides."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    def byte_of(self, element: int) -> int:
        """The byte of the block's memory at which an element begins."""
        return self.offset + element * self.dtype.itemsize

    def bytes_in(self, memory: Tensor) -> Tensor:
        """The parameter's part of the block's memory."""
        return memory[self.offset : self.offset + self.nbytes]

    def flat(self, numbers: Tensor) -> Tensor:
        """A parameter's values, flat and in the order of the block's memory."""
        numbers = numbers.detach()
        if numbers.stride() != self.stride:
            lying = torch.empty_strided(
                self.shape, self.stride, dtype=self.dtype, device=numbers.device
            )
            numbers = lying.copy_(numbers)
        return numbers.as_strided((numbers.numel(),), (1,))

    def view(self, memory: Tensor) -> Tensor:
        """View the parameter in its block's memory, given as bytes or in the parameter's dtype."""
        numbers = memory if memory.dtype == self.dtype else memory.view(self.dtype)
        begins = numbers.storage_offset() + self.offset // self.dtype.itemsize
        return numbers.as_strided(self.shape, self.stride, begins)


#: Views of a piece of memory by dtype, cached because there are many weights and views take time.
Numbers = dict[torch.dtype, Tensor]


def numbers_in(memory: Tensor, dtype: torch.dtype, known: Numbers) -> Tensor:
    """View memory in a dtype; `known` caches the views of the same memory."""
    if dtype not in known:
        known[dtype] = memory.view(dtype)
    return known[dtype]


@dataclass(kw_only=True, eq=False)
class Unit:
    """A block, and the places of its weights."""

    path: str
    module: nn.Module
    places: dict[nn.Parameter, Place]
    nbytes: int
    slab: Tensor
    """On the host: the weights of this block that no earlier block has as well; empty if they are
    on disk."""
    disk_bytes: int = 0
    """On disk: the size of those weights, which come first in the block's memory."""
    borrowed: list[tuple[Tensor, Place]] = field(default_factory=list)
    """The bytes of weights that an earlier block has on the host, and their places in this one."""
    memory: Tensor | None = None
    """On the GPU, while the block is there or being fetched."""
    numbers: Numbers = field(default_factory=dict)
    """Views of the same memory, by dtype."""
    copies: list[Copy] = field(default_factory=list)
    """The last copies of it from the host to the GPU."""
    from_disk: list[Copy] = field(default_factory=list)
    """The copies of it from disk, until they were waited for."""
    puts: int = 0
    """The number of writes to disk weights at the time of the fetch."""
    is_here: bool = False
    """Whether the compute stream was told to wait for these copies."""
    versions: dict[nn.Parameter, int] = field(default_factory=dict)
    """The versions of the fetched values: how often the host's had been changed by then."""
    is_outdated: bool = False
    """Whether the host has newer values by now, and only a running backward needs these."""

    runs: int = 0
    """How often its forward began."""
    written: set[nn.Parameter] = field(default_factory=set)
    """Own parameters that its forward writes to through `data`, which changes no version."""

    def looks(self) -> bool:
        """Whether the forward that begins is one of those whose writes are checked."""
        self.runs += 1
        return self.runs & (self.runs - 1) == 0

    def shows(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter still views the block's memory, and was not given other data."""
        with own_work():
            own = cdata_of(parameter.untyped_storage())
        return self.memory is not None and own == cdata_of(self.memory.untyped_storage())

    def is_on_disk(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is on disk."""
        return self.places[parameter].offset < self.disk_bytes

    def parameter_at(self, offset: int) -> nn.Parameter:
        """The parameter at this byte of the memory."""
        *_, found = (p for p, place in self.places.items() if place.offset <= offset)
        return found


def lay_out(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Place]:
    """Places for these parameters, one after the other."""
    places: dict[nn.Parameter, Place] = {}
    end = 0
    for parameter in parameters:
        places[parameter] = Place.of(parameter, end)
        end = places[parameter].end
    return places


def end_of(places: Iterable[Place]) -> int:
    """The number of bytes that all of these places need."""
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
    """The parameters that only the blocks use."""
    inside = {module for block in blocks for module in block.modules()}
    outside = {p for m in model.modules() if m not in inside for p in own_parameters(m)}
    streamed = {p for module in inside for p in own_parameters(module)} - outside
    if not streamed:
        raise BadInput("the blocks have no weights of their own: there is nothing to stream")
    if plain := [p for p in streamed if is_traceable_wrapper_subclass(p)]:
        raise BadInput(
            f"a weight {list(plain[0].shape)} is a {type(plain[0]).__name__}, whose memory cannot"
            " be streamed: leave its block on the GPU"
        )
    return streamed


def refuse_shared_memory(parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    """Refuse weights on this device that share memory with others, such as views of one buffer.

    The owner of the buffer expects to find them in it; and offloading them would not free it.
    """
    seen: dict[int, nn.Parameter] = {}
    for parameter in parameters:
        if parameter.device != device or not parameter.numel():
            continue
        other = seen.setdefault(cdata_of(parameter.untyped_storage()), parameter)
        if other is not parameter:
            raise BadInput(
                f"weights {list(other.shape)} and {list(parameter.shape)} are views of one piece of"
                " memory, which cannot be streamed: leave their blocks on the GPU, or give each"
                " parameter memory of its own"
            )


def device_of(parameters: Iterable[nn.Parameter]) -> torch.device:
    """The one device that they are all on."""
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        raise BadInput("the blocks are on several devices: name the one that they are to run on")
    return devices.pop()
