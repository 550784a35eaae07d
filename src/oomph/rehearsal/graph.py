"""A CUDA graph in a rehearsal: it has a memory pool of its own, and launches as one kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from oomph.rehearsal.allocator.replay import GRAPH_POOL
from oomph.rehearsal.recorder import FORWARD, Recorder
from oomph.techniques.cuda_graph import CaptureRefused, Replay
from oomph.techniques.host_reads import HostReads, ReadsData


class RehearsedCapture:
    """Captures on the rehearsed card; see `oomph.techniques.cuda_graph.Capture`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __call__(
        self, work: Callable[[], Tensor], look: Callable[[], None], varying: Sequence[Tensor]
    ) -> tuple[Tensor, Replay]:
        """Run `look` and `work` once for their memory; the time of `work` passes in the replays."""
        recorder = self._recorder
        # The check and the capture happen once; later steps do not repeat them.
        seconds, launches, pool = recorder.seconds, recorder.launches, recorder.pool
        marks = len(recorder.timeline.marks)
        try:
            HostReads.of(look, varying)
        except ReadsData as error:
            recorder.timeline.refuses_capture = True
            raise CaptureRefused from error
        recorder.timeline.emptied.append(recorder.timeline.events)
        began = recorder.seconds
        recorder.pool = GRAPH_POOL
        try:
            result = work()
        finally:
            recorder.pool = pool
        lasts = recorder.seconds - began
        recorder.seconds, recorder.launches = seconds, launches
        del recorder.timeline.marks[marks:]

        def replay() -> None:
            recorder.mark(FORWARD)
            recorder.seconds += lasts
            recorder.launches += 1

        return result, replay
