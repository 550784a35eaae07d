"""What a rehearsed script gets instead of the things that would compile or start processes.

`torch.compile` runs its function as it is, and data workers work in the same process. Each is said
in a note.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader

from oomph.errors import CannotRehearse

Note = Callable[[str], object]


@contextlib.contextmanager
def stand_ins(note: Note) -> Iterator[None]:
    """While active, the stand-ins are in place; `note` hears of each that is used."""
    with contextlib.ExitStack() as stack:

        def put(owner: Any, name: str, stand_in: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, stand_in))

        put(torch, "compile", functools.partial(_compile, note))
        put(DataLoader, "_get_iterator", _work_in_process(DataLoader._get_iterator, note))
        put(torch.multiprocessing, "spawn", _refuse_processes)
        put(torch.multiprocessing, "start_processes", _refuse_processes)
        yield


def _compile(note: Note, model: Any = None, **_: Any) -> Any:
    note("torch.compile was left out: what is reported is the uncompiled step")
    if model is None:
        return lambda function: function
    return _Uncompiled(model) if isinstance(model, nn.Module) else model


class _Uncompiled(nn.Module):
    """Looks like a compiled module: the original is `_orig_mod`, and its attributes show."""

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
