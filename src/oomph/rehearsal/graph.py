"""A CUDA graph in a rehearsal: its memory comes from a pool of its own, its launches are one."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from oomph.rehearsal.allocator.replay import GRAPH_POOL
from oomph.rehearsal.recorder import Recorder
from oomph.techniques.cuda_graph import Replay


class RehearsedCapture:
    """Captures on the card that is rehearsed; see `oomph.techniques.cuda_graph.Capture`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        """Run it once for its memory; the time it takes passes in the replays."""
        recorder = self._recorder
        recorder.timeline.emptied.append(recorder.timeline.events)
        seconds, launches, pool = recorder.seconds, recorder.launches, recorder.pool
        recorder.pool = GRAPH_POOL
        try:
            result = work()
        finally:
            recorder.pool = pool
        lasts = recorder.seconds - seconds
        recorder.seconds, recorder.launches = seconds, launches

        def replay() -> None:
            recorder.seconds += lasts
            recorder.launches += 1

        return result, replay
