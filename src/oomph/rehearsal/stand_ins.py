"""Replaces functions of a rehearsed script that would compile or start processes.

`torch.compile` returns its function unchanged, and data workers run in the same process. Each use
is reported in a note.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from oomph.errors import CannotRehearse
from oomph.process.rehearsal_threads import replaced_here
from oomph.torch_compat import data_loading
from oomph.torch_compat.pytree import tree_map

Note = Callable[[str], object]


@contextlib.contextmanager
def stand_ins(note: Note) -> Iterator[None]:
    """While active, the stand-ins are in place; each that is used is reported to `note`."""
    with contextlib.ExitStack() as stack:

        def put(owner: Any, name: str, stand_in: Any) -> None:
            stack.enter_context(replaced_here(owner, name, stand_in))

        put(torch, "compile", functools.partial(_compile, note))
        put(
            DataLoader, data_loading.GET_ITERATOR, _work_in_process(data_loading.get_iterator, note)
        )
        put(nn.DataParallel, "forward", _forward_on_one_gpu)
        put(torch.multiprocessing, "spawn", _refuse_processes)
        put(torch.multiprocessing, "start_processes", _refuse_processes)
        yield


def _compile(note: Note, model: Any = None, **_: Any) -> Any:
    note("torch.compile was left out: what is reported is the uncompiled step")
    if model is None:
        return lambda function: function
    return _Uncompiled(model) if isinstance(model, nn.Module) else model


class _Uncompiled(nn.Module):
    """Mimics a compiled module: the original is `_orig_mod`, and its attributes show."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_orig_mod"), name)


def _forward_on_one_gpu(parallel: nn.DataParallel[Any], *args: Any, **kwargs: Any) -> Any:
    """With one GPU, call the module itself, after moving its arguments to the GPU."""

    def there(given: Any) -> Any:
        return given.cuda() if isinstance(given, torch.Tensor) else given

    return parallel.module(*tree_map(there, args), **tree_map(there, kwargs))


def _work_in_process(make: Callable[[Any], Any], note: Note) -> Callable[[Any], Any]:
    def iterator(loader: Any) -> Any:
        if loader.num_workers == 0:
            return make(loader)
        note("data workers ran inside the script's own process")
        alone = {"num_workers": 0, "timeout": 0}
        before = {name: loader.__dict__[name] for name in alone}
        loader.__dict__.update(alone)
        try:
            return make(loader)
        finally:
            loader.__dict__.update(before)

    return iterator


def _refuse_processes(*_: Any, **__: Any) -> None:
    raise CannotRehearse("the script starts other processes; only one can be rehearsed so far")
