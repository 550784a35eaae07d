"""Precision: autocast to bf16 or fp16, fp16's loss scaler, and TF32 for fp32 products."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from oomph.errors import BadInput
from oomph.jobs.job import AUTOCAST
from oomph.plans.fidelity import Fidelity
from oomph.plans.techniques import Settings, Target, register
from oomph.process.rehearsal_threads import rehearses_here
from oomph.techniques.technique import ApplyContext, SearchContext, Technique, Tried, Undo
from oomph.torch_compat.backend_flags import set_backend_flag


@dataclass(frozen=True, kw_only=True)
class CastCacheSettings(Settings):
    """How long autocast's half-precision copies of the weights live."""

    dropped: bool = False
    """Whether each copy is made where it is used, and none is kept for the whole forward."""


@register
class CastCache(Technique[CastCacheSettings]):
    """Autocast drops its half-precision copies of the weights after each use."""

    name = "cast_cache"
    title = "autocast's copies"
    words = ("kept", "dropped")
    settings = CastCacheSettings
    changes = Target.PRECISION
    belongs_with = ("precision",)
    tried = Tried.AS_VARIANT
    runs_in_foreign_loops = True

    def elsewhere(self, settings: CastCacheSettings) -> str:
        return "autocast without its cache of weights"

    def fidelity(self, settings: CastCacheSettings, precision: str) -> Fidelity:
        # Where a weight is used twice, its gradients are then added before they are rounded.
        return Fidelity.ROUNDING

    def why_not(self, context: SearchContext) -> str:
        if context.choices.precision not in AUTOCAST:
            return "autocast makes no copies in this precision"
        if context.choices.weights != "own":
            return "the weights are in half precision themselves"
        return "compiled blocks make their own copies" if context.choices.compiled else ""

    def apply(self, settings: CastCacheSettings, context: ApplyContext) -> Undo:
        stage = context.stage
        assert stage is not None
        stage.cast_cache = False

        def undo() -> None:
            stage.cast_cache = True

        return undo


def autocast(
    precision: str, device_type: str, *, cast_cache: bool = True
) -> AbstractContextManager[Any]:
    """The autocast region of a precision, or a null context if the precision has none.

    With `cast_cache` the weights' half-precision copies live for the whole region. Without it, each
    copy is made where it is used and dropped unless autograd saved it; the gradients of a weight
    that is used several times are then added in fp32 instead of half precision.
    """
    dtype = AUTOCAST.get(precision)
    if dtype is None:
        return contextlib.nullcontext()
    region = torch.autocast(device_type, dtype=dtype, cache_enabled=cast_cache)
    return region if not cast_cache else _with_its_own_copies(region)


@contextlib.contextmanager
def _with_its_own_copies(region: AbstractContextManager[Any]) -> Iterator[None]:
    """The region, with its weight copies freed at its end, even inside an outer region."""
    try:
        with region:
            yield
    finally:
        torch.clear_autocast_cache()


@contextlib.contextmanager
def training_modes(precision: str, device_type: str) -> Iterator[None]:
    """While active, PyTorch's modes are those of plain training, whatever surrounds this.

    Gradients are enabled, even inside `no_grad` and inference mode. An outer autocast that differs
    from the precision's is refused as ambiguous. An outer autocast of the same dtype is switched
    off here, because backward must not run inside it.
    """
    is_inside = torch.is_autocast_enabled(device_type)
    if is_inside:
        outer = torch.get_autocast_dtype(device_type)
        if AUTOCAST.get(precision) is not outer:
            raise BadInput(
                f"this was called inside of an autocast to {outer}, and the job's precision is"
                f" {precision}: call it outside of that, and give the precision to the job, as"
                ' precision="bf16-mixed"'
            )
    with torch.inference_mode(False), torch.enable_grad():
        # Not a nested autocast region: weight copies would live until the outermost one ends.
        torch.set_autocast_enabled(device_type, False)
        try:
            yield
        finally:
            torch.set_autocast_enabled(device_type, is_inside)


def make_scaler(precision: str, device_type: str) -> torch.amp.GradScaler | None:
    """fp16's loss scaler; other precisions need none."""
    return torch.amp.GradScaler(device_type) if precision == "fp16-mixed" else None


def use_tf32(on: bool = True) -> Undo:
    """Run fp32 matrix products and convolutions on Tensor Cores, with 10 bits of mantissa.

    With `on` false they run in full fp32, which PyTorch does by default for matrix products only.
    All threads share the setting, and it takes no memory, so a rehearsal does not change it.
    """
    if rehearses_here():
        return lambda: None
    undo = remember_tf32()
    torch.set_float32_matmul_precision("high" if on else "highest")
    set_backend_flag(torch.backends.cudnn, "allow_tf32", on)
    return undo


def remember_tf32() -> Undo:
    """Return an undo that restores the current values of the settings that `use_tf32` changes."""
    if rehearses_here():
        return lambda: None
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    def undo() -> None:
        torch.set_float32_matmul_precision(before[0])
        set_backend_flag(torch.backends.cudnn, "allow_tf32", before[1])

    return undo
