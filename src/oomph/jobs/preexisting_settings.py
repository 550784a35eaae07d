"""Sets aside a model's preexisting settings while a plan makes its own choices.

Gradient checkpointing by transformers, timm or diffusers would recompute again what a plan
recomputes, and also what it keeps; a model that was compiled as a whole would be recompiled around
blocks that are compiled separately.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from oomph.torch_compat.compiler import COMPILED_CALL, ORIGINAL
from oomph.torch_compat.modules import children_of

#: Attribute of a module that checkpoints its blocks: in transformers and diffusers, and in timm.
_CHECKPOINTS = ("gradient_checkpointing", "grad_checkpointing")


def uncompiled(model: nn.Module) -> nn.Module:
    """The original model inside what `torch.compile` returned, or the model itself."""
    inside = children_of(model).get(ORIGINAL)
    return model if inside is None else uncompiled(inside)


def checkpoints_itself(model: nn.Module) -> bool:
    """Whether the model itself checkpoints its blocks."""
    return any(
        getattr(module, name, False) is True for module in model.modules() for name in _CHECKPOINTS
    )


def put_aside(model: nn.Module) -> Callable[[], None]:
    """Switch off the model's own checkpointing and compilation, in all its modules."""
    before = [
        (module, name, value)
        for module in model.modules()
        for name in (*_CHECKPOINTS, COMPILED_CALL)
        if (value := getattr(module, name, None)) is True or (name == COMPILED_CALL and value)
    ]
    for module, name, _ in before:
        setattr(module, name, None if name == COMPILED_CALL else False)

    def undo() -> None:
        for module, name, value in before:
            setattr(module, name, value)

    return undo
