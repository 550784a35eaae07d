"""A job without its weights' values, for analysing later how its loss is computed by then."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import nn

from oomph.jobs.job import Job

#: The most elements of a buffer whose values are kept.
SMALL = 1 << 16


def skeleton(job: Job) -> Job | None:
    """The job with a copy of its model whose tensors take no memory; None if it cannot be copied.

    The loss stays the user's own, in the state it has by the time it is analysed.
    """
    assert isinstance(job.model, nn.Module)
    memo: dict[int, Any] = {}
    for parameter in job.model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in job.model.buffers():
        # The values in a small buffer may decide what the forward does.
        is_small = buffer.numel() <= SMALL
        memo[id(buffer)] = buffer.detach().cpu().clone() if is_small else buffer.to("meta")
    try:
        model = copy.deepcopy(job.model, memo)
    except Exception:
        return None  # contains something that cannot be copied: a lock, an open file
    return dataclasses.replace(job, model=model, optimizer=None, batch=())


def catch_up(bones: nn.Module, model: nn.Module) -> None:
    """Update a skeleton with what changed in the model since the skeleton was made.

    That is modes, counters and other plain values, and small buffers.
    """
    for bone, module in zip(bones.modules(), model.modules(), strict=False):
        own = vars(bone)
        for name, value in vars(module).items():
            if type(value) in _PLAIN and type(own.get(name)) in _PLAIN and name in own:
                own[name] = value
    theirs = dict(model.named_buffers())
    for name, buffer in bones.named_buffers():
        now = theirs.get(name)
        if now is not None and not buffer.is_meta and now.shape == buffer.shape:
            buffer.copy_(now)


_PLAIN = (bool, int, float, str, type(None))
