"""Accelerate inside a budget: `prepare` with a plan applied, and the loop stays as it is.

model, optimizer, loader = prepare(accelerator, model, optimizer, loader, budget="24GiB")
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()

The loader gives each batch in the plan's parts, and `accelerator.backward` weighs their losses, so
that every optimizer step is one on the batch that was asked for. A prepared optimizer and scheduler
step once for each.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from oomph.errors import BadInput, MissingExtra, OomphError
from oomph.integrations.framework_plan import (
    Fitted,
    Say,
    fit_framework,
    sample_batch,
    say_it,
)
from oomph.job import AUTOCAST, Job, Precision, batch_size, compute_loss, split_batch
from oomph.planning.plan import Plan
from oomph.reporting.plans import describe_plan_briefly
from oomph.running.random_state import random_state_kept
from oomph.techniques.micro_batch import in_evaluation
from oomph.techniques.technique import Fidelity
from oomph.units import parse_bytes

try:
    from accelerate import Accelerator
except ImportError as error:
    raise MissingExtra("accelerate", "accelerate") from error

#: Counts what a loss averages over.
Items = Callable[[Any], Any]

_PRECISIONS: dict[str, Precision] = {"no": "fp32", "fp16": "fp16-mixed", "bf16": "bf16-mixed"}
#: What labels hold where there is nothing to predict.
_IGNORED = -100


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    *others: Any,
    budget: str | int | None = None,
    loss: Callable[..., Tensor] | nn.Module | None = None,
    items: Items | None = None,
    batch: Any = None,
    allow: str | Fidelity = Fidelity.EXACT,
    unplanned: bool = False,
    say: Say = say_it,
) -> tuple[Any, ...]:
    """What `accelerator.prepare` returns for the same arguments, with a plan applied.

    `loss` is the one that the loop computes: `loss(model, batch)`, a criterion for pairs of inputs
    and targets, or None for models that return their own. `items` counts what it averages over in
    a batch; by default the labels that are not ignored, for models with their own loss, and samples
    for others. `batch` is one like the largest there will be. `allow` is how far numbers may be
    from those of the plain loop. With `unplanned`, training goes on without a plan where none can
    be made. The loader's `take_back` makes the model plain again.
    """
    if budget is not None:
        parse_bytes(budget)  # complains at once
    things = (model, optimizer, loader, *others)
    prepared = None
    try:
        if accelerator.num_processes > 1 or accelerator.mixed_precision not in _PRECISIONS:
            raise BadInput(
                "oomph plans for one process in fp32, fp16 or bf16, not for"
                f" {accelerator.num_processes} in {accelerator.mixed_precision}"
            )
        # Before it is prepared: accelerate's loader would take note of being looked into.
        sample = batch if batch is not None else sample_batch(loader, accelerator.device)
        prepared = accelerator.prepare(*things)
        model, stepped, inner, *rest = prepared
        job = Job(
            model,
            loss,
            stepped.optimizer,
            sample,
            precision=_PRECISIONS[accelerator.mixed_precision],
            name=type(model).__name__,
        )
        # Two stand for all: from the second one on, gradients are there in forward.
        accumulated = min(accelerator.gradient_accumulation_steps, 2)
        fitted = fit_framework(
            job,
            device=accelerator.device,
            budget=budget,
            allow=allow,
            accumulated=accumulated,
        )
    except OomphError as error:
        if not unplanned:
            raise
        say(f"training goes on without a plan: {error}")
        return prepared or accelerator.prepare(*things)  # type: ignore[no-any-return]
    say(f"{job.name} in {describe_plan_briefly(fitted.plan)}")
    count = items or (functools.partial(_labels, model) if loss is None else batch_size)
    return (model, stepped, PartsLoader(inner, accelerator, fitted, count), *rest)


class PartsLoader:
    """A prepared loader whose batches come in parts, which the accelerator adds up.

    `memory` is for `accelerator.log`; `take_back` makes model, optimizer and accelerator plain.
    """

    def __init__(self, inner: Any, accelerator: Any, fitted: Fitted, count: Items) -> None:
        self._fitted = fitted
        self._inner = inner
        self._accelerator = accelerator
        self._count = count
        #: More parts than any batch is split into: what the accelerator counts up to for a batch.
        self._most = max(2, batch_size(fitted.job.batch))
        self._own_steps = accelerator.gradient_accumulation_steps
        self._own_backward = accelerator.backward
        #: What the part that runs counts in its batch.
        self._share: float | Tensor = 1.0
        self._tried = self._over = False
        accelerator.gradient_accumulation_steps = self._most * self._own_steps
        vars(accelerator)["backward"] = self._backward

    def __len__(self) -> int:
        """Batches, not parts: as many as there are optimizer steps in an epoch."""
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __iter__(self) -> Iterator[Any]:
        accelerator, inner = self._accelerator, self._inner
        for number, batch in enumerate(inner):
            if self._over:
                yield batch
                continue
            parts = self._fitted.split(batch)
            if len(parts) > 1:
                self._try_out(batch)
            # The loader looks ahead: it is at its end only with the last part of the last batch.
            at_end = inner.end_of_dataloader
            for at, part in enumerate(parts):
                last = part is parts[-1]
                inner.end_of_dataloader = at_end and last
                accelerator.gradient_state._set_sync_gradients(last)
                # `accumulate` counts on from here; it steps when the count is full.
                begun = number % self._own_steps * self._most
                accelerator.step = begun + (self._most - 1 if last else min(at, self._most - 2))
                self._share = self._share_of(part, batch) if len(parts) > 1 else 1.0
                yield part
            self._share = 1.0

    @property
    def plan(self) -> Plan:
        """The plan that is applied, or was."""
        return self._fitted.plan

    def memory(self) -> dict[str, float]:
        """The peak that was predicted and, on a GPU, the one so far, in GiB."""
        return self._fitted.memory()

    def take_back(self) -> None:
        """Undo the plan; batches are whole again, and what was learned stays."""
        if self._over:
            return
        self._over = True
        self._accelerator.gradient_accumulation_steps = self._own_steps
        vars(self._accelerator).pop("backward", None)
        self._fitted.undo()

    def _backward(self, loss: Tensor, **kwargs: Any) -> None:
        # The accelerator divides by all the parts that it counts up to.
        self._own_backward(loss * (self._share * self._most), **kwargs)

    def _share_of(self, part: Any, batch: Any) -> float | Tensor:
        total = torch.as_tensor(self._count(batch))
        return torch.as_tensor(self._count(part)) / total.clamp(min=1)

    def _try_out(self, batch: Any) -> None:
        """Refuse a loss that its parts, weighed so, do not add up to (rule 6)."""
        if self._tried:
            return
        self._tried = True
        model: Any = self._fitted.job.model
        pair, ones = split_batch(batch, 2)[0], split_batch(batch, 1)[:2]
        compute = functools.partial(compute_loss, self._fitted.job, model)
        # Nothing is compiled for shapes that do not come again.
        with (
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            in_evaluation(model),
            random_state_kept(self._fitted.device),
        ):
            whole = float(compute(pair))
            added = sum(float(compute(one) * self._share_of(one, pair)) for one in ones)
        tolerance = 1e-2 if self._fitted.plan.choices.precision in AUTOCAST else 1e-4
        if math.isfinite(whole) and not math.isclose(whole, added, rel_tol=tolerance, abs_tol=1e-6):
            raise BadInput(
                f"the loss of two samples is {whole:.6g}, but {added:.6g} if each is computed"
                " alone, so oomph cannot weigh the parts of a batch; say what the loss averages"
                " over: prepare(…, items=lambda batch: …)"
            )


def _labels(model: nn.Module, batch: Any) -> Any:
    """Labels that a model's own loss averages over; samples where a batch has none."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return batch_size(batch)
    config = getattr(model, "config", None)
    shifts = getattr(model, "loss_type", None) == "ForCausalLM"
    if shifts and not getattr(config, "is_encoder_decoder", False):
        labels = labels[..., 1:]  # a causal model predicts the next token: the first has none
    return (labels != _IGNORED).sum()
