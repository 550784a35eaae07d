"""The copies on the host, in a rehearsed step, from which a run can undo the step.

Where weights are stepped inside backward they are copied first, with their state, while forward and
backward run: the step of a weight waits for its copy. The copies take host memory and no GPU
memory; starting them takes time of the host thread that launches kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from oomph.engine.step import Around
from oomph.rehearsal.recorder import Recorder
from oomph.rehearsal.storages import tensors_in

#: Copies that take the host as long as one launch: 2,036 copies took it 18 ms on an H200.
COPIES_A_LAUNCH = 3
#: Launches that take the host as long as the work around a parameter's copies: its share of an
#: event behind many of them, and waiting for that event.
AROUND = 1


class CopiesToUndo:
    """Copies at `rate` bytes per second, in the order in which backward steps the weights."""

    def __init__(self, recorder: Recorder, optimizer: torch.optim.Optimizer, rate: float) -> None:
        self._recorder = recorder
        self._optimizer = optimizer
        self._rate = rate
        self._ends: dict[Tensor, float] = {}
        self._taken = 0

    def begun_in(self, forward: Around) -> Around:
        """The same context `forward`; the copies begin when the first micro-batch enters it."""
        left = [self._begin]

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            with forward():
                while left:
                    left.pop()()
                yield

        return around

    def _begin(self) -> None:
        end = self._recorder.seconds
        owned = [p for group in self._optimizer.param_groups for p in group["params"]]
        for parameter in reversed(owned):
            end += self._nbytes(parameter) / self._rate
            self._ends[parameter] = end
            self._recorder.launches += len(self._tensors(parameter)) // COPIES_A_LAUNCH + AROUND
        taken = sum(map(self._nbytes, owned))
        self._recorder.timeline.host_bytes += taken - self._taken
        self._taken = taken

    def wait(self, parameter: Tensor) -> None:
        """Wait for a parameter's copy before the parameter is stepped."""
        recorder = self._recorder
        recorder.sent += self._nbytes(parameter)
        if recorder.clock is not None and recorder.waits_for_copies:
            recorder.seconds = max(recorder.seconds, self._ends.get(parameter, 0.0))

    def _nbytes(self, parameter: Tensor) -> int:
        return sum(tensor.nbytes for tensor in self._tensors(parameter))

    def _tensors(self, parameter: Tensor) -> list[Tensor]:
        return [parameter, *tensors_in(self._optimizer.state.get(parameter, {}))]
