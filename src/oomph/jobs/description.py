"""A job as a plan records it, so that the plan is not applied to another one."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from oomph.plans.plan import MadeFor
from oomph.torch_compat.pytree import tree_leaves


def describe_job(
    name: str, model: nn.Module, batch: Any, optimizer: Any, gpu: str | None
) -> MadeFor:
    """Describe a model with this batch and optimizer, on this machine's PyTorch."""
    digest = hashlib.sha256()
    for path, parameter in model.named_parameters():
        kind = tuple(parameter.shape), parameter.dtype, parameter.requires_grad
        digest.update(f"{path}{kind}".encode())
    shapes = [tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    return MadeFor(
        job=name,
        parameters=sum(p.numel() for p in model.parameters()),
        weights=digest.hexdigest()[:16],
        batch=tuple(shapes),
        optimizer=type(optimizer).__name__,
        torch=torch_version(),
        gpu=gpu,
    )


def torch_version() -> str:
    """PyTorch's version to the precision that matters for memory: 2.11."""
    return ".".join(torch.__version__.split(".")[:2])
