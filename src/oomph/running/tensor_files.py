"""safetensors files, written and read a piece at a time, each with a checksum.

The library's own writer wants all tensors on the host at once. Here a tensor is on its way to the
file in pieces, so a file of any size takes one piece of host memory and none on the device. The
files are plain safetensors; reading maps them into memory, so only what is touched is read.

The checksum is zlib's CRC-32: it finds every flipped bit and every cut, it is as fast as a disk,
and it does not stop anybody who means harm.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from oomph.errors import BadCheckpoint, BadInput

#: Bytes that are on their way at a time.
PIECE = 32 << 20

#: What safetensors calls PyTorch's types.
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a file must be when it is read."""

    size: int
    crc32: str


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], numbers: Callable[[Tensor], Tensor] = lambda t: t
) -> Written:
    """Write a new file and wait until it is on the disk.

    `numbers` gives what a tensor stands for, one after the other: they may not all have room.
    """
    checksum = size = 0
    with path.open("xb") as file:
        for piece in _bytes_of(tensors, numbers):
            file.write(piece)
            checksum, size = zlib.crc32(piece, checksum), size + len(piece)
        file.flush()
        os.fsync(file.fileno())
    return Written(size=size, crc32=f"{checksum:08x}")


def size_of(tensors: Mapping[str, Tensor]) -> int:
    """The size of the file that `write_tensors` would write; refuses what it cannot write."""
    return len(_header(tensors)) + sum(tensor.nbytes for tensor in tensors.values())


def check_file(path: Path, expected: Written) -> None:
    """Complain of a file that is missing, cut short or damaged."""
    checksum = size = 0
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == expected.size:
                while piece := file.read(PIECE):
                    checksum, size = zlib.crc32(piece, checksum), size + len(piece)
            else:
                size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}") from None
    if size != expected.size:
        raise BadCheckpoint(f"{path} has {size:,} of {expected.size:,} bytes: it was cut or edited")
    if f"{checksum:08x}" != expected.crc32:
        raise BadCheckpoint(f"{path} is damaged: its checksum is not the one it was written with")


class MappedTensors:
    """The tensors of a file on the host; reading one's numbers is what reads the file.

    They are views of the file: copy what is to be kept.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise BadCheckpoint(f"{path} is no safetensors file: {error}") from None
        self._path = path
        self.names: frozenset[str] = frozenset(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.names:
            raise BadCheckpoint(f"{self._path} lacks the tensor {name}")
        tensor: Tensor = self._file.get_tensor(name)
        return tensor


def _bytes_of(
    tensors: Mapping[str, Tensor], numbers: Callable[[Tensor], Tensor]
) -> Iterator[memoryview]:
    yield memoryview(_header(tensors))
    for name in _order(tensors):
        for piece in _pieces(numbers(tensors[name]).detach()):
            yield piece.view(torch.uint8).numpy().data


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor's numbers on the host, in order."""
    count = PIECE // tensor.element_size()
    if tensor.is_contiguous():
        tensor = tensor.view(-1)
    else:
        count = max(count * len(tensor) // max(tensor.numel(), 1), 1)  # rows
    for start in range(0, len(tensor), count):
        yield tensor[start : start + count].cpu().reshape(-1).contiguous()


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    end = 0
    entries = {}
    for name in _order(tensors):
        tensor, start = tensors[name], end
        kind = _name_of_type(name, tensor)
        end += tensor.nbytes
        entries[name] = {
            "dtype": kind,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Those of the widest numbers first, so that each begins at a multiple of its width."""
    return sorted(tensors, key=lambda name: -tensors[name].element_size())


def _name_of_type(name: str, tensor: Tensor) -> str:
    plain = tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)
    if tensor.dtype not in _NAMES or not plain or tensor.is_meta:
        kind = f"{type(tensor).__name__} of {tensor.dtype}, {tensor.layout} on {tensor.device}"
        raise BadInput(f"{name} cannot be saved: it is a {kind}, and only plain tensors can")
    return _NAMES[tensor.dtype]
