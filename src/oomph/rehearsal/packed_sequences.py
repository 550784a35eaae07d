"""Packed sequences of different lengths: one row for each real (unpadded) time step.

How many sequences are still running at each step is a small tensor on the host, whose values
PyTorch's recurrent layers read in C++. A rehearsal therefore uses a real tensor for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from oomph.rehearsal.dispatching import replaced_kernels
from oomph.torch_compat.dispatch import disable_current_modes

_KEYS = ("AutogradCPU", "CPU")


def pack(input: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Like `_pack_padded_sequence`: all steps in one table, and the batch size at each time."""
    rows = input.new_empty(sum(lengths), *input.shape[2:])
    with disable_current_modes():
        times = torch.arange(max(lengths), device="cpu").unsqueeze(1)
        alive = (torch.tensor(lengths, device="cpu") > times).sum(1)
    return rows, alive


def batch_sizes_of(batch_sizes: Tensor) -> list[int]:
    """How many sequences there are at each time."""
    with disable_current_modes():
        sizes: list[int] = batch_sizes.tolist()
        return sizes


@contextlib.contextmanager
def packed_sequences() -> Iterator[None]:
    """While active, replaces the C++ kernel that reads the numbers of packed sequences."""
    with replaced_kernels() as replace:
        for key in _KEYS:
            replace("_pad_packed_sequence", _pad, key)
        yield


def _pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Unpack, in the ops that PyTorch runs: one copy per run of equal batch sizes."""
    sizes = batch_sizes_of(batch_sizes)
    longest = total_length if total_length > 0 else len(sizes)
    output = data.new_full((longest, sizes[0], *data.shape[1:]), padding_value)
    begin = row = 0
    for at in range(1, len(sizes) + 1):
        if at < len(sizes) and sizes[at] == sizes[begin]:
            continue
        count = sizes[begin] * (at - begin)
        part = data.narrow(0, row, count).view(at - begin, sizes[begin], *data.shape[1:])
        output.narrow(0, begin, at - begin).narrow(1, 0, sizes[begin]).copy_(part)
        row, begin = row + count, at
    lengths = torch.tensor(
        [sum(size > row for size in sizes) for row in range(sizes[0])], device="cpu"
    )
    return output.transpose(0, 1) if batch_first else output, lengths
