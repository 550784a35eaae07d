"""The link between the GPU and the host: copies that run while the GPU computes.

The one rule: the caller of a copy keeps the returned `Copy` until it has been waited for. Every
race comes from breaking it: a copy reads and writes memory without the computing stream knowing,
and the allocator could hand that memory to the next op. A `Copy` therefore holds both of its
tensors until it is waited for.

There are four links: `CudaLink` has a stream per direction, `InstantLink` copies at once (for the
CPU), a rehearsal's link takes only predicted time, and the tests' link copies as late as it may.

Host work on copied data goes through the link as well: a worker thread runs it, or the rehearsal's
clock predicts when it would be done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

#: Pairs of a source and the target it is copied to.
Pairs = Sequence[tuple[Tensor, Tensor]]


class Copy(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Make later work of the computing stream wait for the copy; the host does not wait."""

    def finish(self) -> None:
        """Block the host until the copy is done; it may then read or overwrite the memory."""


class HostWork(Copy, Protocol):
    """Host work under way: `wait`, like `finish`, blocks the host.

    Both raise the error that the work ended with, if any.
    """

    def is_done(self) -> bool:
        """Whether waiting would return at once."""


class Link(Protocol):
    """Copies between the GPU and the host, beside the computing stream."""

    def to_host(self, source: Tensor, target: Tensor, after: Sequence[Copy] = ()) -> Copy:
        """Copy what the computing stream has written to `source` by now.

        `after` are earlier copies in the other direction that `target` has to wait for. Copies in
        one direction run one after the other.
        """

    def to_gpu(self, source: Tensor, target: Tensor, after: Sequence[Copy] = ()) -> Copy:
        """Copy into `target`, which the computing stream no longer uses, once `after` are done."""

    def to_host_all(self, pairs: Pairs, after: Sequence[Copy] = ()) -> Copy:
        """Copy each source to its target; waiting waits for all of them.

        For many tensors at once: starting each copy costs host time.
        """

    def to_gpu_all(self, pairs: Pairs, after: Sequence[Copy] = ()) -> Copy:
        """The same in the other direction."""

    def host_work(
        self,
        work: Callable[[], None],
        nbytes: int,
        after: Sequence[Copy] = (),
        *,
        only_numbers: bool = False,
    ) -> HostWork:
        """Have the host do `work`, which reads and writes `nbytes`, once `after` are done.

        Work items run one after the other, beside the calling thread. `only_numbers` says that the
        work only writes values into existing memory: a rehearsal, which has no real memory, skips
        it.
        """

    def host_memory(self, nbytes: int) -> Tensor:
        """Host memory with fast copies to and from the GPU; freed with the last reference."""

    def close(self) -> None:
        """Wait for every copy and release everything."""


class DoneCopy:
    """A copy that is done."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def finish(self) -> None:
        """Nothing to wait for."""


class Copies:
    """Several copies that are waited for as one; if one fails, the others are still waited for."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self.each = copies

    def wait(self) -> None:
        """Wait for each."""
        with contextlib.ExitStack() as waits:
            for copy in reversed(self.each):
                waits.callback(copy.wait)

    def finish(self) -> None:
        """Wait for each."""
        with contextlib.ExitStack() as waits:
            for copy in reversed(self.each):
                waits.callback(copy.finish)


class DoneWork(DoneCopy):
    """Work that is already done."""

    def is_done(self) -> bool:
        """Always true."""
        return True


class InstantLink:
    """Copies at once, where there is no GPU or nothing to overlap with."""

    def to_host(self, source: Tensor, target: Tensor, after: Sequence[Copy] = ()) -> Copy:
        """Copy now."""
        target.copy_(source)
        return DoneCopy()

    def to_gpu(self, source: Tensor, target: Tensor, after: Sequence[Copy] = ()) -> Copy:
        """Copy now."""
        target.copy_(source)
        return DoneCopy()

    def to_host_all(self, pairs: Pairs, after: Sequence[Copy] = ()) -> Copy:
        """Copy now."""
        return Copies([self.to_host(source, target, after) for source, target in pairs])

    def to_gpu_all(self, pairs: Pairs, after: Sequence[Copy] = ()) -> Copy:
        """Copy now."""
        return Copies([self.to_gpu(source, target, after) for source, target in pairs])

    def host_work(
        self,
        work: Callable[[], None],
        nbytes: int,
        after: Sequence[Copy] = (),
        *,
        only_numbers: bool = False,
    ) -> HostWork:
        """Do it now."""
        work()
        return DoneWork()

    def host_memory(self, nbytes: int) -> Tensor:
        """Plain memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def close(self) -> None:
        """Nothing to wait for."""
