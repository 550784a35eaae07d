"""A technique of your own: what forward saves for backward waits in bf16, with half the bytes.

All there is to a technique is here. The planner tries it by itself, a plan says what it is worth,
applies it and takes it back, and holds its settings in its JSON.

    python examples/own_technique.py
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import oomph
from oomph.errors import BadInput
from oomph.plans.choices import Choices
from oomph.plans.fidelity import Fidelity
from oomph.plans.techniques import Settings, register
from oomph.techniques.recompute import replace_forward
from oomph.techniques.technique import ApplyContext, SearchContext, Technique, Undo
from oomph.torch_compat.storages import cdata_of


# What it is told. Each field has a default; with all of them the technique is off.
@dataclass(frozen=True, kw_only=True)
class SavedInHalfSettings(Settings):
    """How tensors wait for backward."""

    dtype: Literal["own", "bf16"] = "own"
    """What those of fp32 are kept in."""
    at_least: int = 1024
    """Numbers of a tensor that is worth it."""


# What there is to know of it. A plan's JSON has it under `name`, a plan's diff under `title`.
@register
class SavedInHalf(Technique[SavedInHalfSettings]):
    """Saved tensors of fp32 wait in bf16."""

    name = "saved_in_half"
    title = "saved tensors"
    settings = SavedInHalfSettings
    # It touches the model's forward alone, so that a Trainer's loop may have it, too.
    runs_in_foreign_loops = True

    def say(self, settings: SavedInHalfSettings) -> str:
        return "as they are" if settings.dtype == "own" else f"in {settings.dtype}"

    def fidelity(self, settings: SavedInHalfSettings, precision: str) -> Fidelity:
        return Fidelity.ROUNDING

    def check(self, settings: SavedInHalfSettings, choices: Choices) -> None:
        if settings.at_least < 1:
            raise BadInput(f"a tensor has at least one number, not {settings.at_least}")

    def why_not(self, context: SearchContext) -> str:
        if context.choices.precision not in ("fp32", "tf32"):
            return "most of what is saved has half the bytes already"
        return ""

    def options(self, context: SearchContext) -> Sequence[SavedInHalfSettings]:
        return [SavedInHalfSettings(dtype="bf16")]

    def apply(self, settings: SavedInHalfSettings, context: ApplyContext) -> Undo:
        model = context.model
        weights = {cdata_of(weight.untyped_storage()) for weight in model.parameters()}

        def is_worth_it(tensor: Tensor) -> bool:
            return (
                tensor.dtype is torch.float32
                and tensor.numel() >= settings.at_least
                # A weight is there anyway: a copy of it would be one more.
                and cdata_of(tensor.untyped_storage()) not in weights
            )

        return replace_forward(model, _halving(model.forward, is_worth_it))


def _halving(
    forward: Callable[..., Any], is_worth_it: Callable[[Tensor], bool]
) -> Callable[..., Any]:
    def pack(tensor: Tensor) -> Tensor | tuple[Tensor]:
        return (tensor.bfloat16(),) if is_worth_it(tensor) else tensor

    def unpack(packed: Tensor | tuple[Tensor]) -> Tensor:
        return packed[0].float() if isinstance(packed, tuple) else packed

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with saved_tensors_hooks(pack, unpack):
            return forward(*args, **kwargs)

    return run


def make_job() -> oomph.Job:
    """Layers of many sizes: none is like another, so that none is recomputed."""
    widths = [256 + 16 * at for at in range(9)]
    layers = [
        layer
        for width, next_width in itertools.pairwise(widths)
        for layer in (nn.Linear(width, next_width), nn.GELU())
    ]
    batch = (torch.ones(2048, widths[0]), torch.ones(2048, widths[-1]))
    # The whole batch is needed at once, as batch norm needs it.
    return oomph.Job(
        nn.Sequential(*layers), nn.MSELoss(), "sgd", batch, whole_batch=True, name="net"
    )


def main() -> None:
    """Plan a job that fits only with it."""
    print(oomph.plan(make_job(), budget="44MiB"))


if __name__ == "__main__":
    main()
