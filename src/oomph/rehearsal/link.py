"""The link in a rehearsal: nothing is copied, but the clock knows when each copy would be done.

Copies of one direction come one after the other, beside the kernels. Whoever waits for a copy moves
the clock on to its end, so a rehearsed step takes as long as what of its copies is not hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oomph.gpus import GPU
from oomph.gpus.profile import load_profile
from oomph.host.link import Copy, HostWork, Pairs
from oomph.rehearsal.host_memory import Cores, CoreWork, Lane
from oomph.rehearsal.recorder import Recorder, Side

#: The part of the data sheet's rate that both directions reach at once, measured on an H200.
REACHED = 0.79

#: Parameters that a host's fused AdamW updates per second in fp32, where it was not measured: what
#: 16 threads beside an H200 reach.
HOST_ADAM = 3.7e9
#: What such an update reads and writes of a parameter: four numbers in, three out.
HOST_ADAM_BYTES = 28
#: The time of the host that a copy takes, with the events and the Python around it, in launches of
#: a kernel: measured beside an H200 with models of many small parameters. Others that go with it
#: take one each.
COPY_LAUNCHES = 4


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second to the host and back, with both directions in use."""

    out: float
    back: float

    @property
    def slower(self) -> float:
        """Of the slower direction."""
        return min(self.out, self.back)

    @classmethod
    def of(cls, gpu: GPU) -> LinkRates:
        """As measured beside this card, or from its data sheet."""
        profile = load_profile(gpu.name)
        if profile is None or profile.device_to_host is None or profile.host_to_device is None:
            return cls(REACHED * gpu.host_link, REACHED * gpu.host_link)
        alone = profile.device_to_host + profile.host_to_device
        together = (profile.both_ways or alone) / alone
        return cls(together * profile.device_to_host, together * profile.host_to_device)


class RehearsedLink:
    """A link between the card that is rehearsed and its host; see `oomph.host.link.Link`."""

    def __init__(self, recorder: Recorder, gpu: GPU) -> None:
        self._recorder = recorder
        rates = LinkRates.of(gpu)
        self._out, self._in = Lane(rates.out), Lane(rates.back)
        profile = load_profile(gpu.name)
        host_adam = (profile.host_adam if profile else None) or HOST_ADAM
        self._cores = Cores(HOST_ADAM_BYTES * host_adam, (self._out, self._in))
        self.disk_free = 0.0
        """When the disk behind the link is done with all that it was given so far."""

    def to_host(self, source: Tensor, target: Tensor, after: Sequence[Copy] = ()) -> Copy:
        """Begin when the kernels so far are done."""
        return self.to_host_all([(source, target)], after)

    def to_gpu(self, source: Tensor, target: Tensor, after: Sequence[Copy] = ()) -> Copy:
        """Begin when the kernels so far are done."""
        return self.to_gpu_all([(source, target)], after)

    def to_host_all(self, pairs: Pairs, after: Sequence[Copy] = ()) -> Copy:
        """Begin when the kernels so far are done."""
        self._recorder.sent += _nbytes(pairs)
        return self._copy(self._out, pairs, after)

    def to_gpu_all(self, pairs: Pairs, after: Sequence[Copy] = ()) -> Copy:
        """Begin when the kernels so far are done."""
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
        """Do it now, on fake tensors; the clock has it done as fast as memory is read."""
        if not only_numbers:
            with self._recorder.placing(Side.HOST):
                work()
        given = self._cores.give(nbytes, self._earliest(after))
        return RehearsedWork(self._recorder, self._cores, given)

    def host_memory(self, nbytes: int) -> Tensor:
        """Fake memory on the host's side, counted."""
        self._recorder.timeline.host_bytes += nbytes
        with self._recorder.placing(Side.HOST):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def close(self) -> None:
        """Nothing is under way."""

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
    """Holds its tensors as a real one does: they take memory until it is waited for."""

    def __init__(self, recorder: Recorder, end: float, held: Pairs = ()) -> None:
        self.end = end
        self._recorder = recorder
        self._held = held

    def wait(self) -> None:
        """The kernels that follow begin no sooner."""
        _wait_until(self._recorder, self.end)
        self._held = ()

    def finish(self) -> None:
        """As `wait`."""
        self.wait()


class RehearsedWork:
    """Work of the host's cores; see `oomph.host.link.HostWork`."""

    def __init__(self, recorder: Recorder, cores: Cores, work: CoreWork) -> None:
        self._recorder = recorder
        self._cores = cores
        self._work = work

    @property
    def end(self) -> float:
        """When it is done, by what is known now."""
        return self._cores.end_of(self._work, self._recorder.seconds)

    def wait(self) -> None:
        """The kernels that follow begin no sooner."""
        _wait_until(self._recorder, self.end)

    def finish(self) -> None:
        """As `wait`."""
        self.wait()

    def is_done(self) -> bool:
        """Whether the clock is past its end."""
        return self._recorder.seconds >= self.end


def _wait_until(recorder: Recorder, moment: float) -> None:
    if recorder.clock is not None and recorder.waits_for_copies:
        recorder.seconds = max(recorder.seconds, moment)
