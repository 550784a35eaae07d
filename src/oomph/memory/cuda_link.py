"""The link of a real GPU: one copy stream per direction, beside the computing stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from oomph.memory.link import Copy, HostWork, Pairs
from oomph.memory.pinned import PinnedMemory
from oomph.memory.worker import HostWorker
from oomph.torch_compat import cuda


class CudaLink:
    """Copies on its own streams; see `oomph.memory.link.Link`."""

    def __init__(self, device: torch.device) -> None:
        self._computing = _ComputingStream(device)
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)
        self._pinned = PinnedMemory()
        self._worker = HostWorker()

    def to_host(self, source: Tensor, target: Tensor, after: Sequence[Copy] = ()) -> Copy:
        """Copy after everything queued on the computing stream so far."""
        return self._copy(self._out, [(source, target)], after)

    def to_gpu(self, source: Tensor, target: Tensor, after: Sequence[Copy] = ()) -> Copy:
        """Copy after everything queued on the computing stream, which may still use the target."""
        return self._copy(self._in, [(source, target)], after)

    def to_host_all(self, pairs: Pairs, after: Sequence[Copy] = ()) -> Copy:
        """Copy all pairs after everything queued on the computing stream so far."""
        return self._copy(self._out, pairs, after)

    def to_gpu_all(self, pairs: Pairs, after: Sequence[Copy] = ()) -> Copy:
        """Copy all pairs after everything queued on the computing stream so far."""
        return self._copy(self._in, pairs, after)

    def host_work(
        self,
        work: Callable[[], None],
        nbytes: int,
        after: Sequence[Copy] = (),
        *,
        only_numbers: bool = False,
    ) -> HostWork:
        """Run it on the link's worker thread."""
        return self._worker.begin(work, after)

    def host_memory(self, nbytes: int) -> Tensor:
        """Pinned memory of this size, or pageable memory where the driver refuses."""
        return self._pinned.take(nbytes)

    def close(self) -> None:
        """Wait for the thread and both streams, and unpin."""
        self._worker.close()
        self._out.synchronize()
        self._in.synchronize()
        self._pinned.close()

    def _copy(self, stream: torch.cuda.Stream, pairs: Pairs, after: Sequence[Copy]) -> Copy:
        computing = self._computing.now()
        ready = torch.cuda.Event()
        ready.record(computing)
        stream.wait_event(ready)
        for earlier in after:
            if isinstance(earlier, _CudaCopy):
                stream.wait_event(earlier.done)
            else:  # host work, which no stream can wait for
                earlier.finish()
        device = torch.cuda.current_device()
        torch.cuda.set_stream(stream)  # may switch the current device
        try:
            with torch.no_grad():
                for source, target in pairs:
                    target.copy_(source, non_blocking=True)
        finally:
            torch.cuda.set_stream(computing)
            if device != computing.device_index:
                torch.cuda.set_device(device)
        done = torch.cuda.Event(blocking=True)  # waiting threads sleep instead of spinning
        done.record(stream)
        return _CudaCopy(self._computing, done, pairs)


class _ComputingStream:
    """A device's computing stream, cached: looked up for every copy, it hardly ever changes."""

    def __init__(self, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._last: tuple[Any, torch.cuda.Stream] | None = None

    def now(self) -> torch.cuda.Stream:
        """The calling thread's current stream."""
        found = cuda.raw_stream(self._index)
        last = self._last
        if last is None or last[0] != found:
            last = self._last = found, torch.cuda.current_stream(self._index)
        return last[1]


class _CudaCopy:
    """A copy whose end is marked by a CUDA event; it holds its tensors until it is waited for."""

    def __init__(self, computing: _ComputingStream, done: torch.cuda.Event, pairs: Pairs) -> None:
        self.done = done
        self._computing = computing
        self._held: Pairs = pairs

    def wait(self) -> None:
        """Make the computing stream wait; work queued later may reuse the memory."""
        self._computing.now().wait_event(self.done)
        self._held = ()

    def finish(self) -> None:
        """Block the calling thread until the copy is done."""
        self.done.synchronize()
        self._held = ()
