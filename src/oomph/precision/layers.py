"""Finds the parts of a model that have their own precision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from oomph.errors import BadInput
from oomph.techniques.fp8_products import can_multiply_in_fp8
from oomph.techniques.number_formats import Level
from oomph.torch_compat.modules import ConvNd

#: Modules that compute products themselves.
_PRODUCTS = (
    nn.Linear,
    nn.Bilinear,
    ConvNd,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A part of a model whose products have one precision."""

    path: str
    module: nn.Module
    weights: tuple[nn.Parameter, ...]
    """Trained weights; a weight shared by several layers belongs to the first one."""
    lowest: int
    """The last level of the ladder that makes a difference to it."""


def find_layers(
    model: nn.Module,
    blocks: Iterable[str],
    ladder: Sequence[Level],
    *,
    leave: Iterable[str] = (),
) -> list[Layer]:
    """The blocks as a whole, and modules outside that multiply, without the paths in `leave`."""
    left = set(leave)
    chosen: list[str] = []
    inside: set[int] = set()
    for path in blocks:
        module = _module_at(model, path)
        if id(module) in inside:
            raise BadInput(f"{path} is inside another layer, or named twice: layers stand apart")
        inside |= {id(part) for part in module.modules()}
        chosen.append(path)
    # Modules inside one that multiplies, such as an attention's output layer, are part of it.
    for path, module in model.named_modules():
        if id(module) not in inside and isinstance(module, _PRODUCTS) and path:
            inside |= {id(part) for part in module.modules()}
            chosen.append(path)
    order = {path: at for at, (path, _) in enumerate(model.named_modules())}
    chosen.sort(key=lambda path: order[path])
    return _with_weights(model, [path for path in chosen if path not in left], ladder)


def _with_weights(model: nn.Module, paths: Sequence[str], ladder: Sequence[Level]) -> list[Layer]:
    owned: set[int] = set()
    layers = []
    for path in paths:
        module = model.get_submodule(path)
        own = [p for p in module.parameters() if p.requires_grad and id(p) not in owned]
        owned |= set(map(id, own))
        products = [part for part in module.modules() if isinstance(part, _PRODUCTS)]
        if not own or not products:
            continue  # frozen layers, too: without gradients their precision cannot be judged
        if any(p.dtype is not torch.float32 for p in module.parameters()):
            raise BadInput(
                f"the weights of {path} are not fp32: adapting precision is for fp32 weights, whose"
                " products can be computed in less"
            )
        last = len(ladder) - 1
        if ladder[last] is Level.FP8 and not any(map(can_multiply_in_fp8, products)):
            last -= 1
        layers.append(Layer(path=path, module=module, weights=tuple(own), lowest=last))
    if not layers:
        raise BadInput(
            f"{type(model).__name__} has no layer that multiplies and is trained: there is no"
            " precision to adapt"
        )
    return layers


def _module_at(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise BadInput(f"{type(model).__name__} has no layer {path!r}") from None
