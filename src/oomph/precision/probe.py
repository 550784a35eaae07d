"""A probe: runs the same samples at the current precision and in fp32, and compares them.

Gradients are examined one by one as backward produces them, and dropped. A sample of those in fp32
is copied to the host for the comparison, so the device holds no more than in a step. Everything
that a forward changes is restored.

Dropout is off in a probe: kernels for other number formats may draw other masks, and the results
would seem completely different.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from oomph.engine.step import Stage
from oomph.engine.transaction import Transaction
from oomph.jobs.job import compute_loss
from oomph.precision.layers import Layer
from oomph.techniques.autocast import autocast, use_tf32
from oomph.techniques.gradient_hooks import GradientHooks
from oomph.techniques.layer_precision import tf32_settings_kept

#: Elements compared of each weight's gradient: more would not tell more.
SAMPLE = 1 << 18
#: If a layer's gradient is a smaller share of the whole than this, it is compared with the whole.
NOTHING = 1e-6
#: Least denominator for the loss: close to zero, its relative error is meaningless.
SMALL_LOSS = 1e-3


@dataclass(frozen=True, kw_only=True)
class LayerDivergence:
    """How far a layer's weight gradients are from those in fp32."""

    relative: float
    """The norm of their difference, relative to the norm in fp32."""
    cosine: float


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """How far one run of the samples is from fp32."""

    loss: float
    """The relative error of the loss."""
    layers: Mapping[str, LayerDivergence]

    @property
    def worst(self) -> float:
        """The largest of them; infinite if anything is not finite."""
        found = [self.loss, *(layer.relative for layer in self.layers.values())]
        return max(found) if all(map(math.isfinite, found)) else math.inf


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one run of the samples."""

    seconds: float
    held: int | None
    """Bytes on the device between forward and backward; None if they are not counted."""


@dataclass(kw_only=True)
class Outcome:
    """One run of the samples: its loss and samples of its gradients."""

    loss: float = math.nan
    finite: bool = False
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """By a weight's id: a sample of its gradient, in fp32 on the host."""
    cost: Cost = field(default_factory=lambda: Cost(seconds=0.0, held=None))


#: Runs the layers at their levels while active.
AtLevels = AbstractContextManager[Any]


class Probe:
    """Runs samples of one batch forward and backward any number of times, without side effects."""

    def __init__(self, stage: Stage, device: torch.device, layers: Sequence[Layer]) -> None:
        # Stepping inside backward is not armed here, so no weights need to be remembered.
        self._stage = dataclasses.replace(stage, in_backward=None)
        self._device = device
        self._layers = layers
        self._transaction = Transaction(device)

    @contextlib.contextmanager
    def _changing_nothing(self) -> Iterator[None]:
        """Let every run start with the same random state and buffers, and restore them."""
        weights = list(self._stage.model.parameters())
        gradients = [weight.grad for weight in weights]
        for weight in weights:
            weight.grad = None
        self._transaction.begin(self._stage)
        try:
            yield
        finally:
            self._transaction.roll_back(self._stage)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient

    def run_in_fp32(self, part: Any, at_fp32: AtLevels) -> Outcome:
        """Run the samples in fp32, as the reference."""
        with tf32_settings_kept():
            use_tf32(on=False)
            return self._run(part, at_fp32, contextlib.nullcontext())

    def run(self, part: Any, at_levels: AtLevels) -> Outcome:
        """Run the samples as a step would, with layers at these levels."""
        stage = self._stage
        outside = autocast(stage.job.precision, stage.device_type, cast_cache=stage.cast_cache)
        with tf32_settings_kept():
            return self._run(part, at_levels, outside)

    def compare(self, outcome: Outcome, reference: Outcome) -> Divergence:
        """How far the outcome is from the reference."""
        whole = math.sqrt(sum(_dot(one, one) for one in reference.gradients.values()))
        error = abs(outcome.loss - reference.loss) / max(abs(reference.loss), SMALL_LOSS)
        layers = {
            layer.path: _compare(layer, outcome.gradients, reference.gradients, NOTHING * whole)
            for layer in self._layers
        }
        return Divergence(loss=error if outcome.finite else math.inf, layers=layers)

    def _run(self, part: Any, at_levels: AtLevels, outside: AtLevels) -> Outcome:
        stage, outcome = self._stage, Outcome()
        finite: list[Tensor] = []
        scale = stage.scaler.get_scale() if stage.scaler is not None else 1.0
        held = self._allocated()
        started = self._now()
        with (
            self._changing_nothing(),
            at_levels,
            self._looking_at_gradients(outcome, finite),
            # Do not compile for samples that are used only once.
            torch.compiler.set_stance("force_eager"),
            torch.enable_grad(),
            _NoDropout(),
        ):
            with outside:
                loss = compute_loss(stage.job, stage.model, part)
            now = self._allocated()
            (loss * scale).backward()
        seconds = self._now() - started
        outcome.loss = float(loss.detach())
        outcome.finite = math.isfinite(outcome.loss) and all(map(bool, finite))
        outcome.cost = Cost(
            seconds=seconds, held=now - held if now is not None and held is not None else None
        )
        return outcome

    @contextlib.contextmanager
    def _looking_at_gradients(self, outcome: Outcome, finite: list[Tensor]) -> Iterator[None]:
        """Examine every gradient as soon as it exists, and drop it."""
        compared = {id(weight) for layer in self._layers for weight in layer.weights}

        def look(weight: Tensor) -> None:
            gradient = weight.grad
            weight.grad = None
            if gradient is None:
                return
            finite.append(gradient.isfinite().all())
            if id(weight) in compared:
                outcome.gradients[id(weight)] = _sample(gradient)

        model = self._stage.model
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        handles = [weight.register_post_accumulate_grad_hook(look) for weight in trained]
        try:
            with GradientHooks(model, once=True).withheld():  # this is not a step of the user's
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _allocated(self) -> int | None:
        on_card = self._device.type == "cuda"
        return torch.cuda.memory_allocated(self._device) if on_card else None

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _sample(gradient: Tensor) -> Tensor:
    flat = gradient.reshape(-1)
    # An odd step does not walk along one column of a matrix, whose sides are usually even.
    step = math.ceil(flat.numel() / SAMPLE) | 1
    return flat[:: step if flat.numel() > SAMPLE else 1].float().cpu()


def _compare(
    layer: Layer,
    gradients: Mapping[int, Tensor],
    reference: Mapping[int, Tensor],
    floor: float,
) -> LayerDivergence:
    difference = theirs = own = both = 0.0
    for weight in layer.weights:
        one, other = gradients.get(id(weight)), reference.get(id(weight))
        if one is None or other is None:
            continue  # the loss does not depend on it
        difference += _dot(one - other, one - other)
        own += _dot(one, one)
        theirs += _dot(other, other)
        both += _dot(one, other)
    away = math.sqrt(difference)
    return LayerDivergence(
        relative=away / max(math.sqrt(theirs), floor) if away else 0.0,
        cosine=both / math.sqrt(own * theirs) if own * theirs > 0 else 1.0,
    )


def _dot(one: Tensor, other: Tensor) -> float:
    return float(torch.dot(one.double(), other.double()))


class _NoDropout(TorchFunctionMode):
    """Turns dropout off in all calls."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return _keep_all(func, *args, **kwargs)
        # By name: `F` may hold a technique's function for now, which calls the one that comes here.
        if getattr(func, "__name__", "") == "scaled_dot_product_attention":
            return _attend(func, *args, **kwargs)
        return func(*args, **kwargs)


#: Dropout functions used by `nn.Dropout` and its kin, and called directly.
_DROPOUTS: tuple[Callable[..., Tensor], ...] = (
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
)


def _keep_all(
    func: Callable[..., Tensor],
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    return func(input, p, False, inplace)


def _attend(
    func: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *rest: Any,
    **options: Any,
) -> Tensor:
    return func(query, key, value, attn_mask, 0.0, *rest, **options)
