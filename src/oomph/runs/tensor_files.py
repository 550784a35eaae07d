"""safetensors files, written and read in pieces, each file with a checksum.

The library's own writer needs all tensors on the host at once. This one writes a tensor in pieces,
so a file of any size takes one piece of host memory and none on the device. The files are plain
safetensors; they are memory-mapped for reading, so only what is used is read.

The checksum is zlib's CRC-32: it detects every flipped bit and every truncation, is as fast as a
disk, and does not protect against tampering.
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

from oomph.errors import BadCheckpoint, BadInput
from oomph.files.reading import open_regular
from oomph.files.schema import Count
from oomph.files.writing import open_new
from oomph.process.interrupts import interrupts
from oomph.quoting import brief
from oomph.torch_compat.dispatch import is_traceable_wrapper_subclass

#: Bytes copied and written at a time.
PIECE = 32 << 20

#: safetensors' names for PyTorch's dtypes.
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
    """The expected size and checksum of a file."""

    size: Count
    crc32: str


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], numbers: Callable[[Tensor], Tensor] = lambda t: t
) -> Written:
    """Write a new file and wait until it is on disk.

    `numbers` is called for one tensor after the other to get its contents: memory may not hold all
    of them at once.
    """
    checksum = size = 0
    with open_new(path) as file:
        for piece in _bytes_of(tensors, numbers):
            interrupts.let_through()
            file.write(piece)
            checksum, size = zlib.crc32(piece, checksum), size + len(piece)
        file.flush()
        os.fsync(file.fileno())
    return Written(size=size, crc32=f"{checksum:08x}")


def size_of(tensors: Mapping[str, Tensor]) -> int:
    """The size of the file that `write_tensors` would write; refuses tensors it cannot write."""
    return len(_header(tensors)) + sum(tensor.nbytes for tensor in tensors.values())


def check_file(path: Path, expected: Written) -> None:
    """Raise an error for a file that is missing, truncated or damaged."""
    checksum = size = 0
    try:
        with open_regular(path) as file:
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
    """The tensors of a file on the host; the file is read only when their contents are.

    They are views of the file: copy what is to be kept.
    """

    def __init__(self, path: Path) -> None:
        try:
            open_regular(path).close()  # mapping a named pipe would block until it is written to
            self._file: Any = safe_open(path, framework="pt")
            self.names: frozenset[str] = frozenset(self._file.keys())
        except OSError as error:
            why = error.strerror or error
            raise BadCheckpoint(f"{path} is no safetensors file: {why}") from None
        except (SafetensorError, ValueError, TypeError) as error:
            raise BadCheckpoint(f"{path} is no safetensors file: {error}") from None
        self._path = path

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.names:
            raise BadCheckpoint(f"{self._path} lacks the tensor {name}")
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except (SafetensorError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            why = f"cannot be read by this PyTorch: {error}"
            raise BadCheckpoint(f"{self._path}: the tensor {brief(name)} {why}") from None
        return tensor


def _bytes_of(
    tensors: Mapping[str, Tensor], numbers: Callable[[Tensor], Tensor]
) -> Iterator[memoryview]:
    yield memoryview(_header(tensors))
    for name in _order(tensors):
        for piece in _pieces(numbers(tensors[name]).detach()):
            yield piece.view(torch.uint8).numpy().data


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor's contents on the host, in order."""
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
    """Tensors with the widest dtypes first, so that each is aligned to its element size."""
    return sorted(tensors, key=lambda name: -tensors[name].element_size())


def _name_of_type(name: str, tensor: Tensor) -> str:
    plain = tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)
    if tensor.dtype not in _NAMES or not plain or tensor.is_meta:
        kind = f"{type(tensor).__name__} of {tensor.dtype}, {tensor.layout} on {tensor.device}"
        raise BadInput(f"{name} cannot be saved: it is a {kind}, and only plain tensors can")
    return _NAMES[tensor.dtype]
