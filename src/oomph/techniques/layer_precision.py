"""Run one layer at a precision of its own, whatever surrounds it.

Inputs and outputs keep the types they would have otherwise: a layer in bf16 inside an fp32 model
returns fp32. Backward computes in the precision of forward. Autocast ensures that by itself, and so
does recompute, which restores autocast's state; TF32 is a process-wide setting, and is set again
when backward enters the layer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from oomph.techniques.autocast import remember_tf32, use_tf32
from oomph.techniques.fp8_products import can_multiply_in_fp8, multiply_in_fp8
from oomph.techniques.number_formats import Level
from oomph.techniques.recompute import replace_forward
from oomph.techniques.technique import Undo
from oomph.torch_compat.pytree import tree_leaves, tree_map

_HALF = (torch.bfloat16, torch.float16)
_Forward = Callable[..., Any]


class LayerPrecision:
    """One layer that can run at any level; it does so between `apply` and its undo."""

    def __init__(self, module: nn.Module, device_type: str, *, cast_cache: bool = True) -> None:
        self._module = module
        self._device_type = device_type
        self._cast_cache = cast_cache
        #: Made once: a compiled layer would be recompiled for new functions.
        self._in_fp8: list[tuple[nn.Module, _Forward]] | None = None

    def apply(self, level: Level) -> Undo:
        """Run the layer at this level; undo leaves it exactly as it was."""
        with contextlib.ExitStack() as undos:
            if level is Level.FP8:
                for linear, forward in self._fp8_forwards():
                    undos.callback(replace_forward(linear, forward))
            run = functools.partial(self._run, level, remember_tf32(), self._module.forward)
            undos.callback(replace_forward(self._module, run))
            return undos.pop_all().close

    def _run(
        self, level: Level, outside: Undo, forward: _Forward, *args: Any, **kwargs: Any
    ) -> Any:
        dtype, device_type = level.autocast, self._device_type
        plain_outside = not torch.is_autocast_enabled(device_type)
        if dtype is None:
            args, kwargs = tree_map(_to_fp32, (args, kwargs))
        region = torch.autocast(
            device_type,
            dtype=dtype or torch.get_autocast_dtype(device_type),
            enabled=dtype is not None,
            cache_enabled=self._cast_cache,
        )
        with _fp32_products(level, (args, kwargs), outside) as see_outputs, region:
            out = forward(*args, **kwargs)
        if plain_outside and dtype is not None:
            out = tree_map(_to_fp32, out)
        see_outputs(out)
        return out

    def _fp8_forwards(self) -> list[tuple[nn.Module, _Forward]]:
        if self._in_fp8 is None:
            self._in_fp8 = []
            for linear in filter(can_multiply_in_fp8, self._module.modules()):
                undo = multiply_in_fp8(linear)
                self._in_fp8.append((linear, linear.forward))
                undo()
        return self._in_fp8


@contextlib.contextmanager
def tf32_settings_kept() -> Iterator[None]:
    """Restore the TF32 settings at the end, even after a backward that ends in the first layer."""
    put_back = remember_tf32()
    try:
        yield
    finally:
        put_back()


@contextlib.contextmanager
def _fp32_products(level: Level, inputs: Any, outside: Undo) -> Iterator[Callable[[Any], None]]:
    """Set TF32 on or off, here and in backward; yields a function to call with the outputs.

    `outside` restores the settings outside of layers. They cannot be read here: a forward that is
    recomputed inside backward would find the settings that backward made.
    """
    if level.autocast is not None:
        yield lambda out: None
        return
    tf32 = level is Level.TF32

    def enter(_: Tensor) -> None:
        use_tf32(tf32)

    def leave(_: Tensor) -> None:
        outside()

    def see_outputs(out: Any) -> None:
        for tensor in _with_gradients(out):
            tensor.register_hook(enter)

    # Before forward: an in-place write would give the input another place in the graph.
    for tensor in _with_gradients(inputs):
        if not tensor.is_leaf:
            tensor.register_hook(leave)
    with tf32_settings_kept():
        use_tf32(tf32)
        yield see_outputs


def _with_gradients(values: Any) -> list[Tensor]:
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return [leaf for leaf in leaves if leaf.requires_grad]


def _to_fp32(value: Any) -> Any:
    # Not tensor subclasses such as lazy logits, which this would materialise.
    if type(value) is Tensor and value.dtype in _HALF:
        return value.float()
    return value
