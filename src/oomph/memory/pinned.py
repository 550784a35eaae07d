"""Pinned host memory, which the GPU can copy from and to by itself.

PyTorch's own pinned allocator rounds sizes up to powers of two and keeps what was freed. Here each
piece is exactly as large as asked, page-aligned, pinned once and used in every step: pinning takes
up to 0.7 s per GiB.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref
from typing import Any

import torch
from torch import Tensor

from oomph.memory.limits import check_host_memory
from oomph.torch_compat.storages import storage_at

log = logging.getLogger("oomph")

#: Size in bytes from which on huge pages are requested: fewer pages to touch and to pin.
LARGE = 8 << 20


class PinnedMemory:
    """Pieces of pinned memory; each is unpinned with its last reference, or by `close`."""

    def __init__(self) -> None:
        self._pinned: dict[int, weakref.finalize[[int], Any]] = {}
        self._refused = False

    def take(self, nbytes: int) -> Tensor:
        """Pinned memory, or, if refused, pageable memory, which is several times slower."""
        check_host_memory(nbytes, "what leaves the GPU")
        pages = mmap.mmap(-1, max(nbytes, 1))  # anonymous, page-aligned, freed when unused
        if nbytes >= LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel may be built without it
                pages.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(pages, dtype=torch.uint8, count=max(nbytes, 1))[:nbytes]
        # Touched by all cores here: when pinning, the driver would touch page by page on one core.
        memory.zero_()
        if nbytes and not self._refused:  # zero bytes cannot be pinned
            self._pin(memory, nbytes)
        return memory

    def close(self) -> None:
        """Unpin everything; pieces still referenced remain usable as pageable memory."""
        for finalizer in list(self._pinned.values()):
            finalizer()
        self._pinned.clear()

    def _pin(self, memory: Tensor, nbytes: int) -> None:
        address = memory.data_ptr()
        error = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
        if int(error) != 0:
            self._refused = True
            _forget_error()
            log.warning(
                "the driver refuses to pin %d bytes of host memory (%s): copies will be several"
                " times slower; raise the limit on locked memory (ulimit -l)",
                nbytes,
                error,
            )
            return
        storage = memory.untyped_storage()
        self._pinned[address] = weakref.finalize(storage, _unpin, address)


def _forget_error() -> None:
    """Clear CUDA's pending error, which would otherwise be blamed on the next kernel launch."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


def seen_from(device: torch.device, pinned: Tensor) -> Tensor:
    """Pinned memory as a GPU tensor at the same address; it does not keep the memory alive."""
    storage = storage_at(pinned.data_ptr(), device, pinned.nbytes)
    there = torch.empty(0, dtype=pinned.dtype, device=device)
    return there.set_(storage, 0, pinned.shape, pinned.stride())
