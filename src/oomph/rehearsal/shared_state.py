"""Restores Python state that a rehearsed model shares with the user's model (rule 13).

The rehearsed model is a copy. Global variables and closures, such as those of a hook that counts,
are not copied with it; neither are the random streams of Python and numpy.
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from oomph.errors import CannotRehearse
from oomph.jobs.job import Job
from oomph.techniques.iterators import NotCopied, copy_of
from oomph.techniques.optimizer_steps import foreign_step_hooks
from oomph.techniques.python_state import PythonState, same_state
from oomph.torch_compat.fake_tensors import FakeTensor

#: How many objects are searched at most in what a cached function remembers.
_MOST_REMEMBERED = 4096


@contextlib.contextmanager
def shared_state_kept(job: Job) -> Iterator[None]:
    """Restore, at the end, the state that the rehearsed model shares with the user's."""
    shared = PythonState([("the model", job.model), *_optimizer_of(job)])
    loss = PythonState([("the loss", job.loss)])  # the loss is not copied at all
    python, numpy = random.getstate(), np.random.get_state()
    try:
        # The user's iterators stay where they are: what runs here goes on from copies.
        for state, only_shared in ((loss, False), (shared, True)):
            _copy_iterators(state, only_shared=only_shared)
        yield
    finally:
        if random.getstate() != python:
            random.setstate(python)
        if not same_state(np.random.get_state(), numpy):
            np.random.set_state(numpy)
        loss.put_back()
        shared.put_back_shared()
        for cache in (*loss.caches, *shared.caches):
            if _remembers_fakes(cache):
                cache.cache_clear()


def _optimizer_of(job: Job) -> list[tuple[str, Any]]:
    """The user's optimizer, and what was added to its step."""
    optimizer = job.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        return [("the optimizer", optimizer)]
    hooks = [("a hook", hook) for hook in foreign_step_hooks(optimizer, None)]
    return [("the step", vars(optimizer).get("step")), ("the optimizer", optimizer), *hooks]


def _copy_iterators(state: PythonState, *, only_shared: bool) -> None:
    """Whoever holds an iterator holds a copy of it, or what refuses to go on."""
    held = state.iterators(only_shared=only_shared)
    if not held:
        return
    stand_ins = {
        id(one): NotCopied(place, one) if (copied := copy_of(one)) is None else copied
        for place, one in held
    }
    state.hold_instead(stand_ins, only_shared=only_shared)
    for place, one in state.from_roots().iterators(only_shared=only_shared):
        if id(one) in stand_ins:
            raise CannotRehearse(
                f"the iterator in {place} would go on in a rehearsal: let the function that uses it"
                " close over it, or put what it gives into the batch"
            )


def _remembers_fakes(cache: Any) -> bool:
    """Whether a caching function holds a fake tensor that it would return to the user."""
    waiting, seen = [cache], set[int]()
    while waiting and len(seen) < _MOST_REMEMBERED:
        one = waiting.pop()
        if isinstance(one, FakeTensor):
            return True
        if id(one) not in seen and not isinstance(one, (type, ModuleType, FunctionType)):
            seen.add(id(one))
            waiting.extend(gc.get_referents(one))
    return False
