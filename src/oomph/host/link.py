"""The link between the GPU and the host: copies that go on while the GPU computes.

Whoever starts a copy gets a `Copy` and keeps it until somebody waited for it. That is the whole
rule, and all races come from breaking it: a copy reads and writes memory behind the back of the
stream that computes, and the allocator would give that memory to the next op. A `Copy` therefore
holds both of its tensors until it is waited for.

There are four links: `CudaLink` has a stream for each direction, `InstantLink` copies at once (the
CPU's), a rehearsal has one that takes no time but the clock's, and tests have one that copies as
late as it may.

Work of the host on what was copied is given to the link as well: a thread of its own does it, or
the clock tells when it would be done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

#: Sources and the targets that they are copied to.
Pairs = Sequence[tuple[Tensor, Tensor]]


class Copy(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """All later work of the computing stream comes after the copy; the host does not wait."""

    def finish(self) -> None:
        """The host waits until the copy is done, and may then read or overwrite what it copied."""


class HostWork(Copy, Protocol):
    """Work of the host under way: it is the host that waits for it, in `wait` as in `finish`.

    Whoever waits gets the error that it ended with, if any.
    """

    def is_done(self) -> bool:
        """Whether nobody would have to wait."""


class Link(Protocol):
    """Copies between the GPU and the host, beside the work of the stream that computes."""

    def to_host(self, source: Tensor, target: Tensor, after: Sequence[Copy] = ()) -> Copy:
        """Copy what the computing stream has put into `source` by now.

        `after` are earlier copies of the other direction that `target` has to wait for. Copies of
        one direction come one after the other.
        """

    def to_gpu(self, source: Tensor, target: Tensor, after: Sequence[Copy] = ()) -> Copy:
        """Copy into `target`, which the computing stream no longer uses, once `after` are done."""

    def to_host_all(self, pairs: Pairs, after: Sequence[Copy] = ()) -> Copy:
        """Copy each source to its target; whoever waits, waits for all of them.

        For many tensors at a time: to begin a copy takes time of the host.
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

        Works come one after the other, beside the thread that calls. With `only_numbers` it makes
        nothing but numbers in memory that is there: a rehearsal, which has none, leaves it out.
        """

    def host_memory(self, nbytes: int) -> Tensor:
        """Bytes of host memory that copies are fast from and to; freed with the last reference."""

    def close(self) -> None:
        """Wait for every copy and give everything back."""


class DoneCopy:
    """A copy that is done."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def finish(self) -> None:
        """Nothing to wait for."""


class Copies:
    """Several copies that are waited for as one, also those behind one that fails."""

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
    """Work that is done."""

    def is_done(self) -> bool:
        """It is."""
        return True


class InstantLink:
    """Copies at once: where there is no GPU, or nothing to overlap with."""

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
        return torch.empty(nbytes, dtype=torch.uint8)

    def close(self) -> None:
        """Nothing is under way."""
