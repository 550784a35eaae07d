"""Host memory that the card can copy from and to by itself.

PyTorch's own pinned allocator rounds sizes up to powers of two and keeps what was freed. Here each
piece is exactly as large as asked, page-aligned, pinned once and used in every step: pinning takes
up to 0.7 s for a GiB.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref
from typing import Any

import torch
from torch import Tensor

from oomph.host.limits import check_host_memory

log = logging.getLogger("oomph")

#: Bytes from which on large pages are asked for: there are fewer of them to touch and to pin.
LARGE = 8 << 20


class PinnedMemory:
    """Pieces of pinned memory; each is unpinned with its last reference, or by `close`."""

    def __init__(self) -> None:
        self._pinned: dict[int, weakref.finalize[[int], Any]] = {}
        self._refused = False

    def take(self, nbytes: int) -> Tensor:
        """So many bytes, pinned; pageable, which is several times slower, where that is refused."""
        check_host_memory(nbytes, "what leaves the GPU")
        pages = mmap.mmap(-1, max(nbytes, 1))  # anonymous, page-aligned, given back when unused
        if nbytes >= LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel may be built without
                pages.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(pages, dtype=torch.uint8, count=max(nbytes, 1))[:nbytes]
        # Touched by all cores: the driver, which pins it, would do so page by page on one.
        memory.zero_()
        if nbytes and not self._refused:  # nothing at all cannot be pinned
            self._pin(memory, nbytes)
        return memory

    def close(self) -> None:
        """Unpin everything; whoever still holds a piece can go on using it as plain memory."""
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
    """Let nobody else hear of a refusal: the next kernel launched would be said to have failed."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


def seen_from(device: torch.device, pinned: Tensor) -> Tensor:
    """Pinned memory as kernels of a GPU see it, at the same address; it does not keep it alive."""
    storage = torch._C._construct_storage_from_data_pointer(
        pinned.data_ptr(), device, pinned.nbytes
    )
    there = torch.empty(0, dtype=pinned.dtype, device=device)
    return there.set_(storage, 0, pinned.shape, pinned.stride())
