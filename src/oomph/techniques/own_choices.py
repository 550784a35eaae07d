"""What a model's owner chose for it: put aside while a plan chooses.

Gradient checkpointing, as transformers, timm and diffusers have it, would recompute what a plan
recomputes once more, and what it keeps as well; a model that was compiled as a whole would be
compiled anew around blocks that are compiled by themselves.
"""

from __future__ import annotations

from torch import nn

from oomph.techniques.technique import Undo

#: Of a module that recomputes its blocks: transformers' and diffusers' name for it, and timm's.
_CHECKPOINTS = ("gradient_checkpointing", "grad_checkpointing")
#: Of a module that was compiled in place.
_COMPILED = "_compiled_call_impl"


def uncompiled(model: nn.Module) -> nn.Module:
    """The model inside of what `torch.compile` returned, or itself."""
    inside = model._modules.get("_orig_mod")
    return model if inside is None else uncompiled(inside)


def checkpoints_itself(model: nn.Module) -> bool:
    """Whether it recomputes its blocks by its own means."""
    return any(
        getattr(module, name, False) is True for module in model.modules() for name in _CHECKPOINTS
    )


def put_aside(model: nn.Module) -> Undo:
    """Switch off checkpointing and compilation by the model's own means, in all its modules."""
    before = [
        (module, name, value)
        for module in model.modules()
        for name in (*_CHECKPOINTS, _COMPILED)
        if (value := getattr(module, name, None)) is True or (name == _COMPILED and value)
    ]
    for module, name, _ in before:
        setattr(module, name, None if name == _COMPILED else False)

    def undo() -> None:
        for module, name, value in before:
            setattr(module, name, value)

    return undo
