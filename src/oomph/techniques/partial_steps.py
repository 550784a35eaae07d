"""Optimizer steps that are made in parts: whoever follows whole steps is told once, at the end.

A hook on the steps of all optimizers would be called for every part. One whose object has
`follows_whole_steps` set is not meant to: it asks `is_partial` and waits for `tell_followers`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

#: By thread: each device has its own for backward.
_partial = threading.local()


@contextlib.contextmanager
def part_of_a_step() -> Iterator[None]:
    """While active, an optimizer that steps makes only a part of a step."""
    before = is_partial()
    _partial.is_active = True
    try:
        yield
    finally:
        _partial.is_active = before


def is_partial() -> bool:
    """Whether the step that an optimizer makes now is only a part of one."""
    return getattr(_partial, "is_active", False)


def is_follower(hook: Any) -> bool:
    """Whether a hook on an optimizer's step minds parts of steps by itself."""
    return getattr(getattr(hook, "__self__", None), "follows_whole_steps", False)


def tell_followers(optimizer: torch.optim.Optimizer) -> None:
    """The last part of a step was made."""
    for hook in list(_global_optimizer_post_hooks.values()):
        if is_follower(hook):
            hook(optimizer, (), {})
