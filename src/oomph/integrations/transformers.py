"""Hugging Face `Trainer` inside a budget in one line.

OomphTrainer(model, args, train_dataset=…, budget="24GiB").train()

Arguments, loader, schedule, logging and checkpoints stay the Trainer's. `training_step` runs its
batch in the plan's parts, so the requested batch size and accumulation are kept exactly, and losses
and gradients are those of the plain Trainer. Any other trainer that derives from `Trainer`, such as
TRL's, takes the mixin:

class MyTrainer(OomphMixin, SFTTrainer): ...
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oomph.errors import BadInput, MissingExtra, OomphError
from oomph.explaining.watching import watch
from oomph.integrations.framework_plan import (
    Fitted,
    Say,
    collate_longest,
    fit_framework,
    plan_for_framework,
    say_it,
    twin_of,
)
from oomph.jobs.job import AUTOCAST, Job
from oomph.jobs.preexisting_settings import checkpoints_itself
from oomph.plans.fidelity import Fidelity
from oomph.plans.plan import Plan
from oomph.plans.precisions import Precision
from oomph.process.random_state import random_state_kept
from oomph.techniques.batch_calls import unwatched
from oomph.techniques.technique import techniques_of
from oomph.units import parse_bytes

try:
    from transformers import Trainer, TrainingArguments
except ImportError as error:
    raise MissingExtra("transformers", "hf") from error

_NEXT = "oomph.integrations.transformers.OomphTrainer(…, budget=…) in place of Trainer"


class OomphMixin:
    """Makes a trainer fit a budget; list it before the `Trainer` among the bases of a class.

    `budget` is device memory, by default all of the card; on a GPU it is enforced. `batch` is a
    collated example of the largest batches, by default one of the dataset's longest samples. Longer
    batches are split into more parts. `allow` is how far results may differ from the plain
    Trainer's. With `unplanned`, training continues without a plan if none can be made; otherwise it
    stops with the reason.
    """

    def __init__(
        self,
        *args: Any,
        budget: str | int | None = None,
        batch: Mapping[str, Any] | None = None,
        allow: str | Fidelity = Fidelity.EXACT,
        unplanned: bool = False,
        say: Say = say_it,
        **kwargs: Any,
    ) -> None:
        if budget is not None:
            parse_bytes(budget)  # raises early
        self._budget, self._sample, self._allow = budget, batch, allow
        self._unplanned, self._say = unplanned, say
        self._fitted: Fitted | None = None
        self.plan: Plan | None = None
        """The latest plan; see `make_plan`."""
        super().__init__(*args, **kwargs)

    def make_plan(self) -> Plan:
        """Plan for this training without training, for `plain_arguments` or for inspection."""
        trainer: Any = self
        given = trainer.optimizer
        try:
            optimizer = trainer.create_optimizer()
            job = self._job(getattr(optimizer, "optimizer", optimizer))
            self.plan = plan_for_framework(job, **self._limits())
        finally:
            trainer.optimizer = given
            self._take_back()
        return self.plan

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Run `Trainer.train` under a plan, and undo the plan afterwards."""
        try:
            with watch(next_command=_NEXT):
                return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._take_back()

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Plan here, where model and optimizer are on their device but not wrapped yet."""
        if self.is_in_train and self._fitted is None:  # type: ignore[attr-defined]
            try:
                self._fit()
            except OomphError as error:
                self._take_back()
                if not self._unplanned:
                    raise
                self._say(f"training goes on without a plan: {error}")
        return super().create_scheduler(*args, **kwargs)  # type: ignore[misc]

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Run one batch of the loader in the planned number of parts."""
        fitted, step = self._fitted, super().training_step  # type: ignore[misc]
        if fitted is None:
            return step(model, inputs, num_items_in_batch)  # type: ignore[no-any-return]
        whole = dict(inputs)
        if len(fitted.split(whole)) == 1:
            return step(model, inputs, num_items_in_batch)  # type: ignore[no-any-return]

        def compute(part: Any) -> Tensor:
            with self.compute_loss_context_manager():
                return _loss_on_trial(self, model, part, num_items_in_batch)

        def run(part: Any) -> Tensor:
            with fitted.part(part, fitted.share(part, whole)):
                return step(model, part, num_items_in_batch)  # type: ignore[no-any-return]

        fitted.settle(whole, compute)
        return fitted.in_parts(whole, lambda parts: torch.stack([*map(run, parts)]).sum())

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> Any:
        """The Trainer's own loss; for a part of a batch, its contribution to the batch's loss."""

        def compute() -> Any:
            return super(OomphMixin, self).compute_loss(  # type: ignore[misc]
                model, inputs, return_outputs=return_outputs, **kwargs
            )

        if self._fitted is None or return_outputs:
            return compute()
        return self._fitted.weigh(compute)

    def compute_loss_context_manager(self) -> Any:
        """The Trainer's own context, plus the plan's autocast if its precision differs."""
        stack = contextlib.ExitStack()
        stack.enter_context(super().compute_loss_context_manager())  # type: ignore[misc]
        if self._fitted is not None:
            stack.enter_context(self._fitted.autocast())
        return stack

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log predicted and measured memory with the losses."""
        if self._fitted is not None and "loss" in logs:
            logs.update(self._fitted.memory())
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    # -- planning ---------------------------------------------------------------------------------

    def _fit(self) -> None:
        trainer: Any = self
        job = self._job(getattr(trainer.optimizer, "optimizer", trainer.optimizer))
        self._fitted = fit_framework(job, **self._limits())
        self.plan = self._fitted.plan
        self._say(f"{job.name} in {self.plan.summary}")
        self._say(str(arguments_diff(self.plan, trainer.args)))

    def _job(self, optimizer: torch.optim.Optimizer) -> Job:
        """The job that the Trainer is about to run."""
        trainer: Any = self
        if why := _why_not(trainer):
            raise BadInput(f"{why}: plan for one GPU and one process")
        args, model = trainer.args, trainer.model
        inputs = self._sample if self._sample is not None else _longest(trainer)
        checkpoints = args.gradient_checkpointing or checkpoints_itself(model)
        return Job(
            model,
            functools.partial(_rehearsed_loss, trainer),
            optimizer,
            dict(inputs),
            precision=_precision(args),
            checkpointing="full" if checkpoints else "none",
            # The Trainer computes the norm of all gradients even if it does not clip.
            clip_norm=args.max_grad_norm or math.inf,
            name=type(model).__name__,
        )

    def _limits(self) -> dict[str, Any]:
        args: Any = self.args  # type: ignore[attr-defined]
        return {
            "device": args.device,
            "budget": self._budget,
            "allow": self._allow,
            "accumulated": args.gradient_accumulation_steps,
            "stays_whole": _step_of_its_own(type(self)),
        }

    def _take_back(self) -> None:
        fitted, self._fitted = self._fitted, None
        if fitted is not None:
            fitted.undo()


class OomphTrainer(OomphMixin, Trainer):
    """The `Trainer` of transformers inside a budget; see `OomphMixin` for its extra arguments."""


def _rehearsed_loss(trainer: Any, model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The Trainer's loss for a copy of its model."""
    labels = batch.get("labels")
    counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    with unwatched():  # in training, this number is also computed before the loss
        items = torch.ones((), device=labels.device) if counts and labels is not None else None
    with trainer.compute_loss_context_manager():
        return _loss_on_trial(trainer, model, batch, items)


def _loss_on_trial(trainer: Any, model: nn.Module, batch: Mapping[str, Any], items: Any) -> Tensor:
    """The Trainer's own loss, on a twin: what a subclass records, such as metrics, is dropped."""
    twin = twin_of(trainer)
    twin._fitted = None
    loss: Tensor = twin.compute_loss(model, dict(batch), num_items_in_batch=items)
    return loss


def _why_not(trainer: Any) -> str:
    """Why oomph cannot plan for this training; empty if it can."""
    args = trainer.args
    reasons = {
        "the training runs in several processes": args.world_size > 1,
        "the batch is spread over several GPUs": args.n_gpu > 1,
        "DeepSpeed runs the training": bool(args.deepspeed),
        "FSDP runs the training": bool(args.fsdp),
        "torch_compile compiles the whole model": bool(args.torch_compile),
        "auto_find_batch_size changes the batch": bool(args.auto_find_batch_size),
        "the model is spread over several devices": bool(trainer.is_model_parallel),
    }
    return next((why for why, applies in reasons.items() if applies), "")


def _step_of_its_own(kind: type) -> str:
    """Why a batch stays whole if the user overrode `training_step`: it would run once for each
    part, and see only that part. The overrides of transformers and TRL are safe to run in parts."""
    for base in kind.__mro__:
        known = base.__module__.split(".")[0] in ("oomph", "transformers", "trl")
        if not known and "training_step" in vars(base):
            return f"{base.__name__} has a training_step of its own, which sees whole batches"
    return ""


def _precision(args: TrainingArguments) -> Precision:
    if args.bf16:
        return "bf16-mixed"
    if args.fp16:
        return "fp16-mixed"
    return "tf32" if args.tf32 else "fp32"


def _longest(trainer: Any) -> Any:
    """A batch of the longest samples, as the Trainer would collate it."""
    dataset = trainer.train_dataset
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise BadInput(
            "the dataset can only be iterated over: give a batch like the largest there will be,"
            " as batch="
        )
    collate = trainer._get_collator_with_removed_columns(trainer.data_collator)
    with random_state_kept(trainer.args.device):
        return collate_longest(dataset, collate, trainer.args.train_batch_size)


# -- the plan as plain arguments -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ArgumentsDiff:
    """A plan as `TrainingArguments`, as far as these can express it."""

    changes: Mapping[str, tuple[Any, Any]]
    """By argument name: the values before and after."""
    left_out: tuple[str, ...]
    """Parts of the plan that no argument expresses."""

    def __str__(self) -> str:
        lines = ["as plain TrainingArguments, which come near it:"]
        lines += [f"  {name}: {a!r} → {b!r}" for name, (a, b) in self.changes.items()]
        lines += [f"  no argument for: {words}" for words in self.left_out]
        return "\n".join(lines) if len(lines) > 1 else "the arguments may stay as they are"


def arguments_diff(plan: Plan, args: TrainingArguments) -> ArgumentsDiff:
    """The changes to `args` that express the plan, and the parts that no argument expresses."""
    choices = plan.choices
    wanted: dict[str, Any] = {}
    left_out = []
    if choices.micro_batch is not None:
        total = args.per_device_train_batch_size * args.gradient_accumulation_steps
        size = max(d for d in range(1, choices.micro_batch + 1) if total % d == 0)
        wanted["per_device_train_batch_size"] = size
        wanted["gradient_accumulation_steps"] = total // size
    recomputed = choices.recomputed
    wanted["gradient_checkpointing"] = bool(recomputed)
    if recomputed:
        wanted["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    partly = [how for how in choices.blocks.values() if how not in ("keep", "recompute")]
    if recomputed and (partly or len(recomputed) < len(choices.blocks)):
        left_out.append(
            f"recomputing {len(recomputed)} of {len(choices.blocks)} blocks"
            + (f", {len(partly)} of them in part" if partly else "")
            + "; gradient_checkpointing recomputes all"
        )
    if choices.precision in AUTOCAST:
        wanted[choices.precision.removesuffix("-mixed")] = True
    if choices.precision == "tf32":
        wanted["tf32"] = True
    if choices.compiled and not recomputed and choices.loss_chunk is None:
        wanted["torch_compile"] = True
    elif choices.compiled:
        left_out.append("compiling each block by itself; torch_compile compiles the whole model")
    if choices.loss_chunk is not None:
        left_out.append(
            f"the loss over {choices.loss_chunk} rows of logits at a time; use_liger_kernel has a"
            " loss without logits for the models it knows"
        )
    now = {name: _plain(value) for name, value in vars(args).items()}
    for technique, settings in techniques_of(choices):
        arguments = technique.training_arguments(settings, choices, now)
        if arguments is None:
            left_out.append(technique.elsewhere(settings))
        wanted |= arguments or {}
    changes = {
        name: (before, after)
        for name, after in wanted.items()
        if _plain(before := getattr(args, name)) != after
    }
    return ArgumentsDiff(changes=changes, left_out=tuple(left_out))


def plain_arguments(plan: Plan, args: TrainingArguments, say: Say = say_it) -> TrainingArguments:
    """The plan as plain `TrainingArguments`, for training without oomph; says what is missing.

    Gradient accumulation keeps the global batch. A model that does not take the number of items in
    it (`num_items_in_batch`) then averages averages, so its loss differs if lengths differ.
    """
    diff = arguments_diff(plan, args)
    say(str(diff))
    changed: TrainingArguments = dataclasses.replace(
        args, **{name: after for name, (_, after) in diff.changes.items()}
    )
    return changed


def _plain(value: Any) -> Any:
    """An argument's value, unwrapped if it is an enum."""
    return getattr(value, "value", value)
