"""Accelerate inside a budget: `prepare` also applies a plan; the loop stays unchanged.

model, optimizer, loader = prepare(accelerator, model, optimizer, loader, budget="24GiB")
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()

The loader yields each batch in the plan's parts, and `accelerator.backward` weighs their losses, so
that every optimizer step is for the whole requested batch. A prepared optimizer and scheduler step
once per batch. Gradients are hidden from the loop until those of all parts are there.
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
from oomph.integrations.part_gradients import PartGradients
from oomph.jobs.job import AUTOCAST, Job, batch_size, compute_loss, split_batch
from oomph.plans.fidelity import Fidelity
from oomph.plans.plan import Plan
from oomph.plans.precisions import Precision
from oomph.process.random_state import random_state_kept
from oomph.techniques.parts_trial import in_evaluation
from oomph.units import parse_bytes

try:
    from accelerate import Accelerator
except ImportError as error:
    raise MissingExtra("accelerate", "accelerate") from error

#: The accelerator's methods that work on the gradients of a batch, once.
_ONCE = ("clip_grad_norm_", "clip_grad_value_", "unscale_gradients")
#: Counts the items that a loss averages over.
Items = Callable[[Any], Any]

_PRECISIONS: dict[str, Precision] = {"no": "fp32", "fp16": "fp16-mixed", "bf16": "bf16-mixed"}
#: The label of positions where nothing is predicted.
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
    """Return what `accelerator.prepare` returns for the same arguments, with a plan applied.

    `loss` is the one that the loop computes: `loss(model, batch)`, a criterion for pairs of inputs
    and targets, or None for models that return their own. `items` counts the items of a batch that
    the loss averages over (1 for a sum). Without it, oomph reads this from the graph of the loss,
    which works for averages over samples and over the labels of a model that computes its own loss.
    `batch` is an example of the largest batches. `allow` is how far results may differ from those
    of the plain loop. With `unplanned`, training continues without a plan if none can be made. The
    loader's `take_back` undoes the plan.
    """
    if budget is not None:
        parse_bytes(budget)  # raises early
    things = (model, optimizer, loader, *others)
    prepared = None
    try:
        if accelerator.num_processes > 1 or accelerator.mixed_precision not in _PRECISIONS:
            raise BadInput(
                "oomph plans for one process in fp32, fp16 or bf16, not for"
                f" {accelerator.num_processes} in {accelerator.mixed_precision}"
            )
        # Before `prepare`, because accelerate's loader would register this iteration.
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
        # Two represent all: from the second one on, gradients already exist during forward.
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
    say(f"{job.name} in {fitted.plan.summary}")
    return (model, stepped, PartsLoader(inner, accelerator, fitted, items), *rest)


class PartsLoader:
    """A prepared loader that yields batches in parts, whose gradients the accelerator accumulates.

    `memory` is for `accelerator.log`; `take_back` restores model, optimizer and accelerator.
    """

    def __init__(self, inner: Any, accelerator: Any, fitted: Fitted, items: Items | None) -> None:
        self._fitted = fitted
        self._inner = inner
        self._accelerator = accelerator
        self._items = items
        #: At least as many parts as any batch has; the accelerator counts up to this per batch.
        self._most = max(2, batch_size(fitted.job.batch))
        self._own_steps = accelerator.gradient_accumulation_steps
        self._own_backward = accelerator.backward
        #: The running part's weight in its batch.
        self._share: float | Tensor = 1.0
        self._tried = self._over = False
        self._is_last = True
        model, optimizer = fitted.job.model, fitted.job.optimizer
        assert isinstance(model, nn.Module) and isinstance(optimizer, torch.optim.Optimizer)
        self._gradients = PartGradients(model, optimizer)
        for name in _ONCE:
            once = functools.partial(self._once, getattr(accelerator, name))
            vars(accelerator)[name] = once
        accelerator.gradient_accumulation_steps = self._most * self._own_steps
        vars(accelerator)["backward"] = self._backward

    def __len__(self) -> int:
        """The number of batches, not of parts."""
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
            # The loader looks ahead, but has only ended with the last part of the last batch.
            at_end = inner.end_of_dataloader
            with self._gradients.batch():
                for at, part in enumerate(parts):
                    last = part is parts[-1]
                    inner.end_of_dataloader = at_end and last
                    accelerator.gradient_state._set_sync_gradients(last)
                    # `accumulate` continues from this count, and steps when it is full.
                    begun = number % self._own_steps * self._most
                    accelerator.step = begun + (self._most - 1 if last else min(at, self._most - 2))
                    self._share = self._share_of(part, batch) if len(parts) > 1 else 1.0
                    self._is_last = last
                    if len(parts) == 1:
                        yield part
                        continue
                    with self._gradients.part(last=last):
                        yield part
            self._share, self._is_last = 1.0, True

    @property
    def plan(self) -> Plan:
        """The plan, even after it was undone."""
        return self._fitted.plan

    def memory(self) -> dict[str, float]:
        """The predicted peak and, on a GPU, the peak so far, in GiB."""
        return self._fitted.memory()

    def take_back(self) -> None:
        """Undo the plan; batches are whole again, and the trained state stays."""
        if self._over:
            return
        self._over = True
        self._accelerator.gradient_accumulation_steps = self._own_steps
        self._gradients.show()
        for name in ("backward", *_ONCE):
            vars(self._accelerator).pop(name, None)
        self._fitted.undo()

    def _once(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Clip or unscale only after the last part, when the gradients of all parts are there."""
        if self._is_last:
            return work(*args, **kwargs)
        return torch.zeros((), device=self._fitted.device)  # a norm, for loops that log it

    def _backward(self, loss: Tensor, **kwargs: Any) -> None:
        with self._gradients.backward(last=self._is_last):
            # The accelerator divides by the number of parts that it counts up to.
            self._own_backward(loss * (self._share * self._most), **kwargs)

    def _share_of(self, part: Any, batch: Any) -> float | Tensor:
        count = self._items or self._read_from_graph()
        total, own = (
            one if isinstance(one, Tensor) else torch.as_tensor(one, device="cpu")
            for one in (count(batch), count(part))
        )
        return own / total.clamp(min=1)

    def _read_from_graph(self) -> Items:
        """The counter of the items that the loss averages over. The loop computes the loss outside
        of our hooks, so its own counts cannot be replaced by the whole batch's (rule 6)."""
        split, job = self._fitted.loss_split, self._fitted.job
        own_loss, model = job.loss is None, job.model
        assert isinstance(model, nn.Module)
        if split is None:
            return functools.partial(_labels, model) if own_loss else batch_size
        if split.counts == 0:
            return batch_size if split.power == 1 else lambda _: torch.ones((), device="cpu")
        if own_loss and split.counts == split.means == 1:
            return functools.partial(_labels, model)
        raise BadInput(
            "the loss divides by what it counts in its batch, which differs between parts; say what"
            " it averages over: prepare(…, items=lambda batch: …)"
        )

    def _try_out(self, batch: Any) -> None:
        """Refuse a loss if its parts, weighed like this, do not add up (rule 6)."""
        if self._tried:
            return
        self._tried = True
        model: Any = self._fitted.job.model
        pair = _unlike_pair(batch)
        ones = split_batch(pair, 1)
        compute = functools.partial(compute_loss, self._fitted.job, model)
        # Eager, so that nothing is compiled for shapes that do not occur again.
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


def _unlike_pair(batch: Any) -> Any:
    """Two samples of a batch, the second with fewer labels than the first."""
    pair = split_batch(batch, 2)[0]
    labels = pair.get("labels") if isinstance(pair, Mapping) else None
    if not isinstance(labels, Tensor) or labels.dim() < 2 or labels.is_floating_point():
        return pair
    fewer = labels.clone()
    fewer[1, labels.shape[1] // 2 :] = _IGNORED
    return {**pair, "labels": fewer}


def _labels(model: nn.Module, batch: Any) -> Any:
    """The number of labels that a model's own loss averages over; without labels, of samples."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return batch_size(batch)
    config = getattr(model, "config", None)
    shifts = getattr(model, "loss_type", None) == "ForCausalLM"
    if shifts and not getattr(config, "is_encoder_decoder", False):
        labels = labels[..., 1:]  # a causal model predicts the next token: the first has none
    return (labels != _IGNORED).sum()
