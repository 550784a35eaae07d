"""Find the state that a forward writes to: buffers, weights, attributes, lists, generators.

Techniques that run a forward more than once, or in parts, need to know: recompute, which runs it
again; micro-batches, which run it once for each part; a CUDA graph, whose replays run no Python.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from oomph.techniques.python_state import PythonState, same_state
from oomph.techniques.tensor_writes import TensorWrites, storage_of, stream_of
from oomph.torch_compat.fake_tensors import FakeTensor
from oomph.torch_compat.modules import BUFFERS, PARAMETERS


@dataclass(frozen=True, kw_only=True)
class Written:
    """The state that a forward changes; places are paths like `blocks.0.norm.running_mean`."""

    buffers: tuple[str, ...] = ()
    """Buffers that are written to in place, through a view or `.data`, or replaced."""
    parameters: tuple[str, ...] = ()
    """Parameters that are written to or replaced in the same ways."""
    tensors: tuple[str, ...] = ()
    """Other tensors that an object of the model holds, written to in place."""
    attributes: tuple[str, ...] = ()
    """Other changed state: counters, tensors in attributes, variables that hooks close over;
    `losses[]` means that a container's entries changed. A plain value that was replaced by an equal
    one does not count."""
    elsewhere: tuple[str, ...] = ()
    """Ops that write to memory that existed before and is not the model's, such as an input's."""
    draws: tuple[str, ...] = ()
    """Random streams beside PyTorch's own that are drawn from: `python`, `numpy`, or `generator`
    where an op is given a generator that is not the model's."""

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def inside(self, path: str) -> Written:
        """The writes to the module at this path, without `elsewhere` and `draws`."""
        dot = f"{path}." if path else ""
        return Written(
            **{
                name: tuple(place for place in getattr(self, name) if place.startswith(dot))
                for name in ("buffers", "parameters", "tensors", "attributes")
            }
        )


def find_written(
    model: nn.Module, run: Callable[[], Any], beside: Sequence[tuple[str, Any]] = ()
) -> Written:
    """Run one forward, real or on fake tensors, find what it writes to, and undo the writes.

    The search covers the model's state and the objects `beside` it, such as the loss.

    Weights, buffers, attributes and random streams are restored afterwards, but not the memory
    that `elsewhere` is about: it was not copied.
    """
    before = PythonState([("", model), *beside])
    memory = [(place, tensor, tensor.data, storage_of(tensor)) for place, tensor in before.tensors]
    places = {name: set(_named(model, name)) for name in (BUFFERS, PARAMETERS)}
    lies_at = {
        name: storage_of(tensor) for own in places for name, tensor in _named(model, own).items()
    }
    writes = TensorWrites(tensor for _, tensor in before.tensors)
    with _streams_kept(before.tensors) as drawn_from:
        try:
            with writes:
                run()
            changed = [change.place for change in before.changes() if not change.is_the_same]
            # A rehearsal draws no random numbers, so giving an op a generator counts as a draw.
            given = set(writes.generators)
            held = {stream_of(generator): place for place, generator in before.generators}
            changed += [held[stream] for stream in given & held.keys()]
            moved = {key for _, tensor, _, key in memory if storage_of(tensor) != key}
            written = writes.written | moved
            registered = {name for name, key in lies_at.items() if key in written} | {
                place for place in changed if place in lies_at
            }
            found = {place for place, _, _, key in memory if key in written} | registered
            return Written(
                buffers=_sorted(found & places[BUFFERS]),
                parameters=_sorted(found & places[PARAMETERS]),
                tensors=_sorted(found - lies_at.keys()),
                attributes=_sorted(set(changed) - lies_at.keys()),
                elsewhere=tuple(dict.fromkeys(writes.elsewhere)),
                draws=(*drawn_from(), *(["generator"] if given - held.keys() else [])),
            )
        finally:
            before.put_back()
            for _, tensor, data, key in memory:
                if storage_of(tensor) != key:
                    tensor.data = data
            writes.put_back()


def _named(model: nn.Module, kind: str) -> dict[str, Tensor]:
    """The tensors that modules own, by path; a tensor that two modules own has two paths."""
    return {
        f"{path}.{name}" if path else name: tensor
        for path, module in model.named_modules(remove_duplicate=False)
        for name, tensor in getattr(module, kind).items()
        if tensor is not None
    }


def _sorted(places: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(places))


@contextlib.contextmanager
def _streams_kept(
    tensors: Sequence[tuple[str, Tensor]],
) -> Iterator[Callable[[], tuple[str, ...]]]:
    """Restores the random streams; yields a function that names those outside of PyTorch that were
    drawn from."""
    real = [tensor for _, tensor in tensors if not isinstance(tensor, FakeTensor)]
    devices = {tensor.device for tensor in real if tensor.device.type == "cuda"}
    python, numpy = random.getstate(), np.random.get_state()

    def drawn_from() -> tuple[str, ...]:
        same = {
            "python": random.getstate() == python,
            "numpy": same_state(np.random.get_state(), numpy),
        }
        return tuple(name for name, is_same in same.items() if not is_same)

    with torch.random.fork_rng(sorted(devices, key=str)):
        try:
            yield drawn_from
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
