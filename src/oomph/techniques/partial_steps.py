"""Optimizer steps that are made in parts: hooks that follow whole steps are called once at the end.

PyTorch calls a hook on the steps of all optimizers for every part. A hook whose object has
`follows_whole_steps` set ignores these calls (it checks `is_partial`) and acts when
`tell_followers` calls it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from oomph.torch_compat.optimizers import post_hooks_of_all

#: Thread-local, because each device has its own backward thread.
_partial = threading.local()


@contextlib.contextmanager
def part_of_a_step() -> Iterator[None]:
    """While active, a call of an optimizer's step counts as a part of a step."""
    before = is_partial()
    _partial.is_active = True
    try:
        yield
    finally:
        _partial.is_active = before


def is_partial() -> bool:
    """Whether the optimizer step that runs now is only a part of a step."""
    return getattr(_partial, "is_active", False)


def is_follower(hook: Any) -> bool:
    """Whether a hook on an optimizer's step handles partial steps itself."""
    return getattr(getattr(hook, "__self__", None), "follows_whole_steps", False)


def tell_followers(optimizer: torch.optim.Optimizer) -> None:
    """Call the followers' hooks after the last part of a step."""
    for hook in list(post_hooks_of_all.values()):
        if is_follower(hook):
            hook(optimizer, (), {})
