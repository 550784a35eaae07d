"""Kernels of PyTorch's own ops, replaced for a while.

PyTorch's tracer remembers which kernel an op resolved to. What it learned before the replacement is
wrong while it lasts, and what it learns meanwhile is wrong afterwards: a block compiled after a
rehearsal would have no gradients. So both are forgotten.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

#: Registers a kernel for an op of `aten` under a dispatch key.
Replace = Callable[[str, Callable[..., Any], str], None]


def find_operator(name: str) -> Any:
    """The op that `softmax.int` or `linear` names."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


@contextlib.contextmanager
def replaced_kernels() -> Iterator[Replace]:
    """Gives a function that replaces kernels; at the end all of them are the old ones again."""
    replaced: set[str] = set()
    try:
        with torch.library._scoped_library("aten", "IMPL") as library:

            def replace(name: str, kernel: Callable[..., Any], key: str) -> None:
                library.impl(name, kernel, key)
                replaced.add(name)
                find_operator(name)._dispatch_cache.clear()

            yield replace
    finally:
        for name in replaced:
            find_operator(name)._dispatch_cache.clear()
