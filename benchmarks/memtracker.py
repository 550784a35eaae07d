"""What PyTorch's own MemTracker predicts for the cases, run the way its documentation says.

It needs a machine with a GPU, though its tensors are fake: on one without, fake CUDA tensors do not
go through autograd.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.cases import Case
from oomph.engine.step import Stage, train_step
from oomph.jobs.job import build_model, make_batch, make_optimizer


def memtracker_peak(case: Case) -> int:
    """The peak of two training steps in bytes, as MemTracker sees it."""
    job = case.make()
    device = torch.device("cuda", torch.cuda.current_device())
    with FakeTensorMode(allow_non_fake_inputs=True), device:
        model = build_model(job)
        batch = tree_map(lambda x: x.to(device), make_batch(job))
        optimizer = make_optimizer(str(job.optimizer))(
            [p for p in model.parameters() if p.requires_grad]
        )
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *tree_leaves(batch))
        with tracker:
            for step in range(2):
                train_step(Stage(job=job, model=model, optimizer=optimizer), batch)
                if step == 0:
                    tracker.reset_mod_stats()
        peak: int = tracker.get_tracker_snapshot("peak")[device]["Total"]
        return peak
