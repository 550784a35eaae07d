"""A link for tests that copies as late as it may, and notices what a real one would not forgive."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from oomph.memory.link import Copies, Copy, Pairs


def poison(tensor: Tensor) -> None:
    """Make any use of its contents visible."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else 77)


class DeferredLink:
    """Each direction is a queue; a copy happens when it must, or by chance (`eager`) before.

    On a card a copy that nobody waited for may read memory that was given to another op. Here it
    finds its memory gone, and fails; a target read too early holds poison.
    """

    def __init__(self, *, eager: float = 0.0, seed: int = 0) -> None:
        self.bytes = {"out": 0, "in": 0}
        self.taken = 0
        """Bytes of host memory asked for."""
        self._queues: dict[str, list[_Job | _Work]] = {"out": [], "in": [], "host": []}
        self._eager = eager
        self._random = random.Random(seed)

    def to_host(self, source: Tensor, target: Tensor, after: Sequence[Copy] = ()) -> Copy:
        return self._enqueue("out", source, target, after)

    def to_gpu(self, source: Tensor, target: Tensor, after: Sequence[Copy] = ()) -> Copy:
        return self._enqueue("in", source, target, after)

    def to_host_all(self, pairs: Pairs, after: Sequence[Copy] = ()) -> Copy:
        return Copies([self.to_host(source, target, after) for source, target in pairs])

    def to_gpu_all(self, pairs: Pairs, after: Sequence[Copy] = ()) -> Copy:
        return Copies([self.to_gpu(source, target, after) for source, target in pairs])

    def host_work(
        self,
        work: Callable[[], None],
        nbytes: int,
        after: Sequence[Copy] = (),
        *,
        only_numbers: bool = False,
    ) -> DeferredWork:
        job = _Work(self, work, _jobs(after))
        self._queues["host"].append(job)
        self._run_some()
        return DeferredWork(job)

    def host_memory(self, nbytes: int) -> Tensor:
        self.taken += nbytes
        memory = torch.empty(nbytes, dtype=torch.uint8)
        poison(memory)
        return memory

    def close(self) -> None:
        for queue in self._queues.values():
            while queue:
                queue.pop(0).run()

    def run_until(self, job: _Job | _Work) -> None:
        while not job.done:
            self._queues[job.queue].pop(0).run()

    def _enqueue(
        self, queue: str, source: Tensor, target: Tensor, after: Sequence[Copy]
    ) -> DeferredCopy:
        assert source.shape == target.shape and source.dtype == target.dtype
        job = _Job(self, queue, _Weak(source), _Weak(target), _jobs(after))
        self.bytes[queue] += source.numel() * source.element_size()
        self._queues[queue].append(job)
        self._run_some()
        return DeferredCopy(job, (source, target))

    def _run_some(self) -> None:
        for waiting in self._queues.values():
            while waiting and self._random.random() < self._eager:
                waiting.pop(0).run()


def _jobs(copies: Sequence[Copy]) -> list[_Job | _Work]:
    each = [one for copy in copies for one in (copy.each if isinstance(copy, Copies) else [copy])]
    return [copy.job for copy in each if isinstance(copy, DeferredCopy | DeferredWork)]


class DeferredCopy:
    """Holds both tensors until it is waited for, as a real copy does."""

    def __init__(self, job: _Job, held: tuple[Tensor, ...]) -> None:
        self.job = job
        self._held = held

    def wait(self) -> None:
        self.job.link.run_until(self.job)
        self._held = ()

    def finish(self) -> None:
        self.wait()


class DeferredWork:
    """Work of the host that is done as late as it may be."""

    def __init__(self, job: _Work) -> None:
        self.job = job

    def wait(self) -> None:
        self.job.link.run_until(self.job)
        if self.job.error is not None:
            raise self.job.error

    def finish(self) -> None:
        self.wait()

    def is_done(self) -> bool:
        return self.job.done


class _Work:
    """Work in its queue; its error is for whoever waits."""

    queue = "host"

    def __init__(
        self, link: DeferredLink, work: Callable[[], None], earlier: list[_Job | _Work]
    ) -> None:
        self.link = link
        self.done = False
        self.error: BaseException | None = None
        self._work, self._earlier = work, earlier

    def run(self) -> None:
        for job in self._earlier:
            self.link.run_until(job)
        if not self.done:
            self.done = True
            try:
                self._work()
            except Exception as error:
                self.error = error


class _Job:
    """A copy in its queue, which keeps nothing alive."""

    def __init__(
        self,
        link: DeferredLink,
        queue: str,
        source: _Weak,
        target: _Weak,
        earlier: list[_Job | _Work],
    ) -> None:
        self.link = link
        self.queue = queue
        self.done = False
        self._source, self._target, self._earlier = source, target, earlier
        # Whoever reads the target before the copy gets what the memory held before.
        if not earlier:
            poison(target.tensor())

    def run(self) -> None:
        for job in self._earlier:
            self.link.run_until(job)
        if not self.done:
            self._target.tensor().copy_(self._source.tensor())
            self.done = True


class _Weak:
    """A tensor for as long as somebody holds its memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._dtype = tensor.dtype
        self._view = tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> Tensor:
        storage = self._storage()
        assert storage is not None, "memory was freed while a copy of it was under way"
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._view)


class NobodyWaits(DeferredLink):
    """The host must not wait while it is in a step."""

    stepping = False

    def _enqueue(self, *args: Any) -> Any:
        copy = super()._enqueue(*args)
        finish = copy.finish

        def finish_outside_steps() -> None:
            assert not self.stepping, "the host waited"
            finish()

        copy.finish = finish_outside_steps
        return copy


class CountingLink(DeferredLink):
    """Knows which of its host memory is still in use."""

    def __init__(self, room: float = float("inf"), **how: Any) -> None:
        super().__init__(**how)
        self.room = room
        self.live: dict[int, int] = {}

    def host_memory(self, nbytes: int) -> Tensor:
        if sum(self.live.values()) + nbytes > self.room:
            raise MemoryError("no room on the host")
        memory = super().host_memory(nbytes)
        storage = memory.untyped_storage()
        self.live[storage._cdata] = nbytes
        weakref.finalize(storage, self.live.pop, storage._cdata)
        return memory
