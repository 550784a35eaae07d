"""The host link in a rehearsal: no data is copied, but the clock knows when each copy would finish.

Copies in one direction run one after the other, in parallel with the kernels. Waiting for a copy
moves the clock to the copy's end, so a rehearsed step takes as long as the part of its copies that
the kernels do not hide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oomph.hardware import GPU
from oomph.hardware.profile import load_profile
from oomph.memory.link import Copy, HostWork, Pairs
from oomph.rehearsal.host_memory import Cores, CoreWork, Lane
from oomph.rehearsal.recorder import Recorder, Side

#: The fraction of the data sheet's rate that each direction reaches with both in use; on an H200.
REACHED = 0.79

#: Parameters per second that the host's fused AdamW updates in fp32, for hosts that were not
#: measured: what 16 threads reach beside an H200.
HOST_ADAM = 3.7e9
#: Bytes that such an update reads and writes per parameter: four numbers in, three out.
HOST_ADAM_BYTES = 28
#: Host time per copy, in kernel launches, including its events and the Python around it: measured
#: beside an H200 with models of many small parameters. Each further tensor in the same copy costs
#: one more launch.
COPY_LAUNCHES = 4


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second to the host and back, with both directions in use."""

    out: float
    back: float

    @property
    def slower(self) -> float:
        """The rate of the slower direction."""
        return min(self.out, self.back)

    @classmethod
    def of(cls, gpu: GPU) -> LinkRates:
        """The rates measured beside this card, or else derived from its data sheet."""
        profile = load_profile(gpu.name)
        if profile is None or profile.device_to_host is None or profile.host_to_device is None:
            return cls(REACHED * gpu.host_link, REACHED * gpu.host_link)
        alone = profile.device_to_host + profile.host_to_device
        together = (profile.both_ways or alone) / alone
        return cls(together * profile.device_to_host, together * profile.host_to_device)


class RehearsedLink:
    """The link between the rehearsed card and its host; see `oomph.memory.link.Link`."""

    def __init__(self, recorder: Recorder, gpu: GPU) -> None:
        self._recorder = recorder
        rates = LinkRates.of(gpu)
        self._out, self._in = Lane(rates.out), Lane(rates.back)
        profile = load_profile(gpu.name)
        host_adam = (profile.host_adam if profile else None) or HOST_ADAM
        self._cores = Cores(HOST_ADAM_BYTES * host_adam, (self._out, self._in))
        self.disk_free = 0.0
        """When the disk behind the link finishes all work queued so far."""

    def to_host(self, source: Tensor, target: Tensor, after: Sequence[Copy] = ()) -> Copy:
        """Start the copy when the kernels so far are done."""
        return self.to_host_all([(source, target)], after)

    def to_gpu(self, source: Tensor, target: Tensor, after: Sequence[Copy] = ()) -> Copy:
        """Start the copy when the kernels so far are done."""
        return self.to_gpu_all([(source, target)], after)

    def to_host_all(self, pairs: Pairs, after: Sequence[Copy] = ()) -> Copy:
        """Start the copies when the kernels so far are done."""
        self._recorder.sent += _nbytes(pairs)
        return self._copy(self._out, pairs, after)

    def to_gpu_all(self, pairs: Pairs, after: Sequence[Copy] = ()) -> Copy:
        """Start the copies when the kernels so far are done."""
        self._recorder.brought += _nbytes(pairs)
        return self._copy(self._in, pairs, after)

    def host_work(
        self,
        work: Callable[[], None],
        nbytes: int,
        after: Sequence[Copy] = (),
        *,
        only_numbers: bool = False,
    ) -> HostWork:
        """Run the work now, on fake tensors; the clock charges it at the rate the cores reach."""
        if not only_numbers:
            with self._recorder.placing(Side.HOST):
                work()
        given = self._cores.give(nbytes, self._earliest(after))
        return RehearsedWork(self._recorder, self._cores, given)

    def host_memory(self, nbytes: int) -> Tensor:
        """Take fake host memory, and count it."""
        self._recorder.timeline.host_bytes += nbytes
        with self._recorder.placing(Side.HOST):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def close(self) -> None:
        """There is nothing to close: no copy is really under way."""

    def _copy(self, lane: Lane, pairs: Pairs, after: Sequence[Copy]) -> Copy:
        self._recorder.launches += COPY_LAUNCHES - 1 + len(pairs)
        end = lane.carry(_nbytes(pairs), self._earliest(after))
        return RehearsedCopy(self._recorder, end, pairs)

    def _earliest(self, after: Sequence[Copy]) -> float:
        earlier = [one.end for one in after if isinstance(one, (RehearsedCopy, RehearsedWork))]
        return max(self._recorder.seconds, *earlier, 0.0)


def _nbytes(pairs: Pairs) -> int:
    return sum(source.nbytes for source, _ in pairs)


class RehearsedCopy:
    """A copy that holds its tensors until it is waited for, as a real one does."""

    def __init__(self, recorder: Recorder, end: float, held: Pairs = ()) -> None:
        self.end = end
        self._recorder = recorder
        self._held = held

    def wait(self) -> None:
        """Let no later kernel start before the copy ends."""
        _wait_until(self._recorder, self.end)
        self._held = ()

    def finish(self) -> None:
        """Does the same as `wait`."""
        self.wait()


class RehearsedWork:
    """Work of the host's cores; see `oomph.memory.link.HostWork`."""

    def __init__(self, recorder: Recorder, cores: Cores, work: CoreWork) -> None:
        self._recorder = recorder
        self._cores = cores
        self._work = work

    @property
    def end(self) -> float:
        """When the work ends, as far as is known now."""
        return self._cores.end_of(self._work, self._recorder.seconds)

    def wait(self) -> None:
        """Let no later kernel start before the work ends."""
        _wait_until(self._recorder, self.end)

    def finish(self) -> None:
        """Does the same as `wait`."""
        self.wait()

    def is_done(self) -> bool:
        """Whether the clock has passed the end of the work."""
        return self._recorder.seconds >= self.end


def _wait_until(recorder: Recorder, moment: float) -> None:
    if recorder.clock is not None and recorder.waits_for_copies:
        recorder.seconds = max(recorder.seconds, moment)
