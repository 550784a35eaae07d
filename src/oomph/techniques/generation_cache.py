"""Keys and values that a model keeps for generating: a step has no use for them (exact).

Models of transformers return them from every forward unless they are told not to, and as they come
from the hub they are not (`config.use_cache`). A block that runs twice would add to them twice, so
that beside them none can be recomputed, compiled or captured.

The config stays as it is, for it is saved with the model. Whoever asks a forward for them, or gives
it those of earlier tokens, gets them; so does everybody who calls the model outside of training.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from oomph.jobs.job import Job, make_batch
from oomph.plans.choices import Choices
from oomph.plans.fidelity import Fidelity
from oomph.plans.techniques import Settings, register
from oomph.techniques.recompute import replace_forward
from oomph.techniques.technique import (
    ApplyContext,
    Inspection,
    Technique,
    Tried,
    Undo,
)

#: The arguments of a forward by which somebody continues from earlier tokens.
_EARLIER = ("past_key_values", "cache_params")

#: Why blocks may stay as they are where the cache of keys and values cannot be dropped.
BESIDE_A_CACHE = (
    "keys and values are kept for generating, beside which no block can be recomputed or compiled:"
    " set model.config.use_cache = False (transformers then also keeps samples of one row apart"
    " that position_ids tell apart)"
)

#: Whether forwards are run for their loss alone, in evaluation too.
_for_the_loss = ContextVar("_for_the_loss", default=False)


@dataclass(frozen=True, kw_only=True)
class GenerationCacheSettings(Settings):
    """What a model keeps for generating."""

    dropped: bool = False
    """Whether it keeps no keys and values where a step runs it."""


@register
class GenerationCache(Technique[GenerationCacheSettings]):
    """A model that keeps keys and values for generating keeps none in training."""

    name = "generation_cache"
    title = "keys and values"
    words = ("kept for generating", "not kept")
    settings = GenerationCacheSettings
    tried = Tried.ALWAYS
    alters_forward = True
    runs_in_foreign_loops = True

    def fidelity(self, settings: GenerationCacheSettings, precision: str) -> Fidelity:
        return Fidelity.EXACT

    def inspect(self, job: Job) -> Inspection:
        return _Kept(job)

    def apply(self, settings: GenerationCacheSettings, context: ApplyContext) -> Undo:
        with contextlib.ExitStack() as undos:
            for module in caching_modules(context.model):
                undos.callback(without_cache(module))
            return undos.pop_all().close

    def training_arguments(
        self, settings: GenerationCacheSettings, choices: Choices, now: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        return {"use_cache": False}


class _Kept(Inspection):
    """Whether the model keeps keys and values that its loss may do without."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._seen = False

    @property
    def why_not(self) -> str:
        if not self._seen:
            return "the model keeps nothing for generating"
        if tells_samples_apart(make_batch(self._job)):
            return "the batch tells samples of one row apart"
        return ""

    @property
    def left_alone(self) -> str:
        return BESIDE_A_CACHE if self._seen else ""

    def built(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for module in caching_modules(model):
            notice_cache(module, self._notice)

    def _notice(self) -> None:
        self._seen = True


def caching_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that can be told not to keep anything for generating."""
    if "use_cache" in _arguments(model):
        yield model
    else:
        for child in model.children():
            yield from caching_modules(child)


def without_cache(module: nn.Module) -> Undo:
    """Have a module keep nothing in training, and where it is evaluated for the loss alone."""
    forward = module.forward

    @functools.wraps(forward)
    def keeping_nothing(*args: Any, **kwargs: Any) -> Any:
        if (module.training or _for_the_loss.get()) and _leaves_it_open(module, args, kwargs):
            kwargs = {**kwargs, "use_cache": False}
        return forward(*args, **kwargs)

    return replace_forward(module, keeping_nothing)


@contextlib.contextmanager
def evaluating_the_loss() -> Iterator[None]:
    """While active, nothing is kept in evaluation either, where it is not in training."""
    token = _for_the_loss.set(True)
    try:
        yield
    finally:
        _for_the_loss.reset(token)


def notice_cache(module: nn.Module, notice: Callable[[], None]) -> None:
    """From now on `notice` is called whenever the module returns something for generating."""

    def look(_: nn.Module, __: Any, output: Any) -> None:
        named = [getattr(output, name, None) for name in _EARLIER]
        listed = output if isinstance(output, tuple) else ()
        if any(one is not None for one in named) or any(map(_is_cache, listed)):
            notice()

    module.register_forward_hook(look)


def tells_samples_apart(batch: Any) -> bool:
    """Whether a batch says where samples begin in a row, as packed ones may.

    Models of transformers look at that only where nothing is kept for generating: with and without
    it they then compute different things.
    """
    return isinstance(batch, Mapping) and "position_ids" in batch


def _arguments(module: nn.Module) -> list[str]:
    """The names of what its class's forward takes, in order, without itself."""
    try:
        return list(inspect.signature(type(module).forward).parameters)[1:]
    except (TypeError, ValueError):  # not written in Python
        return []


def _is_cache(value: Any) -> bool:
    """Whether it is what transformers keep keys and values in, told by what one asks it for."""
    return hasattr(value, "get_seq_length")


def _leaves_it_open(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call neither says what is to be kept, nor goes on from any."""
    in_order = dict(zip(_arguments(module), args, strict=False))
    given = {**in_order, **kwargs}
    return "use_cache" not in in_order and all(
        given.get(name) is None for name in ("use_cache", *_EARLIER)
    )
