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
from typing import Any

from torch import nn

from oomph.techniques.recompute import replace_forward
from oomph.techniques.technique import Undo

#: The arguments of a forward by which somebody continues from earlier tokens.
_EARLIER = ("past_key_values", "cache_params")

#: Whether forwards are run for their loss alone, in evaluation too.
_for_the_loss = ContextVar("_for_the_loss", default=False)


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
