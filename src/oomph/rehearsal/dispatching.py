"""Temporarily replaces kernels of PyTorch's own ops.

PyTorch's tracer caches which kernel an op resolved to. Entries from before the replacement are
wrong during it, and entries made during it are wrong afterwards: a block compiled after a rehearsal
would have no gradients. So the cache is cleared at both ends.

A kernel is replaced for the whole process; threads that do not rehearse get the previous one.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from oomph.process.rehearsal_threads import rehearses_here, rehearsing
from oomph.torch_compat.dispatch import (
    DispatchKey,
    has_kernel,
    keys_below,
    resolve_key,
    scoped_library,
)
from oomph.torch_compat.operators import forget_kernels

Kernel = Callable[..., Any]

#: Registers a kernel for an op of `aten` under a dispatch key; None makes the key fall through.
Replace = Callable[[str, Kernel | None, str], None]

#: The kernels that stand in for an op under a key; the last belongs to the innermost rehearsal. One
#: function is registered for them all: while a mode is active, PyTorch looks up kernels written in
#: Python by op and key, and would take the newest one for each of them.
_stand_ins: dict[tuple[str, str], list[Kernel | None]] = {}


#: The latest kernels that were registered. Another thread may be about to call one when it is taken
#: out again: between finding a kernel and calling it, PyTorch waits for Python's lock.
_kept_for_callers: deque[tuple[Kernel, Any]] = deque(maxlen=4096)


def find_operator(name: str) -> Any:
    """The op that a name such as `softmax.int` or `linear` stands for."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


@contextlib.contextmanager
def replaced_kernels() -> Iterator[Replace]:
    """Yields a function that replaces kernels; at the end all the old kernels are back."""
    added: list[tuple[str, str]] = []
    with rehearsing():
        try:
            with scoped_library("aten", "IMPL") as library:

                def replace(name: str, kernel: Kernel | None, key: str) -> None:
                    kernels = _stand_ins.setdefault((name, key), [])
                    if not kernels:
                        operator = find_operator(name)
                        run = _by_thread(name, key, kernels)
                        library.impl(name, run, key, with_keyset=True)
                        _kept_for_callers.append((run, torch.library.get_kernel(operator, key)))
                        forget_kernels(operator)
                    kernels.append(kernel)
                    added.append((name, key))

                yield replace
        finally:
            for name, key in reversed(added):
                _stand_ins[name, key].pop()
                if not _stand_ins[name, key]:
                    del _stand_ins[name, key]
                    forget_kernels(find_operator(name))


def _by_thread(name: str, key: str, kernels: Sequence[Kernel | None]) -> Kernel:
    """Runs the last of `kernels` in threads that rehearse, and the old kernel elsewhere."""
    operator, this = find_operator(name), getattr(DispatchKey, key)
    # Taking out this key alone is not enough. Under the Python dispatcher, which PyTorch's tracer
    # switches on, a kernel is handed all keys of the call, including those above its own: they
    # would lead back here without end. This set has the keys below, and the Python dispatcher if it
    # is on: the ops that follow are still traced.
    below = keys_below(this)

    def pass_on(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return operator.redispatch(keys & below, *args, **kwargs)

    before: Kernel = pass_on
    if not _falls_through(operator, key):
        before = torch.library.get_kernel(operator, key).call_boxed
    # If the tracer has a Python kernel of its own, other threads trace with that one.
    traced = operator.py_kernels.get(resolve_key(operator, this))

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        # The rehearsal may be over by now: other threads of a rehearsed script are not waited for.
        for kernel in kernels[-1:] if rehearses_here() else ():
            return pass_on(keys, *args, **kwargs) if kernel is None else kernel(*args, **kwargs)
        if traced is not None and keys.has(DispatchKey.PythonDispatcher):
            return traced(*args, **kwargs)
        return before(keys, *args, **kwargs)

    return run


def _falls_through(operator: Any, key: str) -> bool:
    """Whether an op has no kernel of its own for autocast, which then passes the call on."""
    return key.startswith("Autocast") and not has_kernel(operator.name(), key)
