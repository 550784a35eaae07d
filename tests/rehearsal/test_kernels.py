"""Memory that CUDA's kernels take while they run, and that the CPU's do not."""

from __future__ import annotations

import torch

from oomph.hardware import find_gpu
from oomph.rehearsal.world import pretend


def test_only_adding_at_indices_sorts_them_first() -> None:
    with pretend(find_gpu("h200")) as recorder:
        table = torch.empty(1000, 8, device="cuda")
        at = torch.empty(5000, dtype=torch.long, device="cuda")
        values = torch.empty(5000, 8, device="cuda")
        before = recorder.allocated
        recorder.peak_allocated = before
        table.index_put_((at,), values)
        assert recorder.peak_allocated == before
        table.index_put_((at,), values, accumulate=True)
        assert recorder.peak_allocated >= before + 4 * at.nbytes
        assert recorder.allocated == before
