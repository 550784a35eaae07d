"""What a run copies to the host in a rehearsed step, so that it can take the step back.

Where weights are stepped inside backward they are copied first, with their state, while forward and
backward run: a step of one waits for its copy. This takes host memory, and none of the GPU's;
beginning the copies takes time of the host that launches kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oomph.rehearsal.link import COPY_LAUNCHES
from oomph.rehearsal.recorder import Recorder
from oomph.rehearsal.storages import tensors_in
from oomph.running.host_copies import TOGETHER


class CopiesToUndo:
    """Copies at `rate` bytes per second, in the order in which backward steps."""

    def __init__(self, recorder: Recorder, optimizer: torch.optim.Optimizer, rate: float) -> None:
        self._recorder = recorder
        self._optimizer = optimizer
        self._rate = rate
        self._ends: dict[Tensor, float] = {}
        #: What beginning the copies of a parameter takes of the host, in launches.
        self._launches: dict[Tensor, int] = {}
        self._taken = 0

    def begin(self) -> None:
        """A step begins, and its copies with it."""
        end = self._recorder.seconds
        owned = [p for group in self._optimizer.param_groups for p in group["params"]]
        together = 0
        for parameter in reversed(owned):
            nbytes = self._nbytes(parameter)
            end += nbytes / self._rate
            self._ends[parameter] = end
            first = COPY_LAUNCHES - 1 if not together else 0
            self._launches[parameter] = len(self._tensors(parameter)) + first
            together = together + nbytes if together + nbytes < TOGETHER else 0
        taken = sum(map(self._nbytes, owned))
        self._recorder.timeline.host_bytes += taken - self._taken
        self._taken = taken

    def wait(self, parameter: Tensor) -> None:
        """A parameter is about to be stepped."""
        recorder = self._recorder
        recorder.sent += self._nbytes(parameter)
        recorder.launches += self._launches.get(parameter, 0)
        if recorder.clock is not None and recorder.waits_for_copies:
            recorder.seconds = max(recorder.seconds, self._ends.get(parameter, 0.0))

    def _nbytes(self, parameter: Tensor) -> int:
        return sum(tensor.nbytes for tensor in self._tensors(parameter))

    def _tensors(self, parameter: Tensor) -> list[Tensor]:
        return [parameter, *tensors_in(self._optimizer.state.get(parameter, {}))]
