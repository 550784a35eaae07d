"""The random stream of a rehearsal: its own, starting at the state of the process's generator.

Samples are shuffled and drawn for real, and code that builds a model seeds first. The process's own
generator is left to the user's program and its other threads (rule 13).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from oomph.process.rehearsal_threads import replaced_here


@contextlib.contextmanager
def own_random_stream() -> Iterator[torch.Generator]:
    """While active, threads that rehearse seed, save and restore the generator that this yields."""
    own = torch.Generator(device="cpu")
    own.set_state(torch.get_rng_state())

    def seed() -> int:
        return int(own.seed())

    def manual_seed(seed: Any) -> torch.Generator:
        return own.manual_seed(int(seed))

    functions: dict[str, Callable[..., Any]] = {
        "get_rng_state": own.get_state,
        "initial_seed": own.initial_seed,
        "manual_seed": manual_seed,
        "seed": seed,
        "set_rng_state": lambda state: own.set_state(state) and None,
    }
    with contextlib.ExitStack() as stack:
        for module in (torch, torch.random):
            for name, function in functions.items():
                stack.enter_context(replaced_here(module, name, function))
        yield own
