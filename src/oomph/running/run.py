"""A Run: a job with a plan applied. `run.step(batch)` is one optimizer step on a global batch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from oomph.errors import BadInput, StalePlan
from oomph.estimation import Ledgers
from oomph.gpus import GPU, find_gpu
from oomph.job import Job, build_model, make_batch, make_optimizer
from oomph.planning.block_timer import BlockTimer
from oomph.planning.plan import MadeFor, Plan
from oomph.planning.planner import plan as make_plan
from oomph.rehearsal.hidden import device_overhead
from oomph.running.applying import apply_choices, refuse_applied
from oomph.running.step import Stage, train_step
from oomph.techniques.technique import Fidelity, Undo
from oomph.units import parse_bytes


class Run:
    """A model and its optimizer under a plan; `undo` gives them back as they were."""

    def __init__(self, plan: Plan, stage: Stage, device: torch.device, undo: Undo) -> None:
        self.plan = plan
        self.steps = 0
        self._stage = stage
        self._device = device
        self._undo: Undo | None = undo

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self._stage.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer; schedulers made for it go on working."""
        assert self._stage.optimizer is not None
        return self._stage.optimizer

    def step(self, batch: Any) -> Tensor:
        """Forward, backward and one optimizer step on a global batch; returns its loss.

        Gradients are the run's own: those it finds do not count, and it leaves none, even if the
        loss raises an error. After that the run can go on.
        """
        self._check_usable()
        self._check_shapes(batch)
        moved = _moved(make_batch(dataclasses.replace(self._stage.job, batch=batch)), self._device)
        self.optimizer.zero_grad(set_to_none=True)
        try:
            loss = train_step(self._stage, moved)
        except BaseException:
            self.optimizer.zero_grad(set_to_none=True)
            raise
        assert loss is not None
        self.steps += 1
        return loss

    def measured(self) -> Ledgers | None:
        """The most memory the process has had so far, as the GPU's allocator counted it."""
        if self._device.type != "cuda":
            return None
        reserved = torch.cuda.max_memory_reserved(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return Ledgers(
            allocated=torch.cuda.max_memory_allocated(self._device),
            reserved=reserved,
            device=total - free + reserved - torch.cuda.memory_reserved(self._device),
        )

    def undo(self) -> None:
        """Take the plan back; model and optimizer keep what they learned."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def _check_usable(self) -> None:
        if self._undo is None:
            raise BadInput("this run is over: its plan was undone")
        in_backward = self._stage.in_backward
        if in_backward is not None and in_backward.dirty:
            raise BadInput(
                "the last step broke off inside backward, where some weights were stepped already"
                " and others were not: undo the run, load your last checkpoint and apply the plan"
                " again"
            )

    def _check_shapes(self, batch: Any) -> None:
        """More samples make more micro-batches; longer ones were not planned for."""
        planned = self.plan.made_for.batch
        shapes = [tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        if len(shapes) != len(planned):
            raise StalePlan(
                f"the plan is for batches of {len(planned)} tensors, and this one has"
                f" {len(shapes)}; plan with a batch like those there will be"
            )
        whole = self.plan.choices.micro_batch is None
        for now, then in zip(shapes, planned, strict=True):
            first = 0 if whole else 1
            if len(now) != len(then) or any(
                a > b for a, b in zip(now[first:], then[first:], strict=True)
            ):
                raise StalePlan(
                    f"the plan is for batches of up to {then}, and this one is {now}; plan with"
                    " the largest batch there will be"
                )

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()


def apply(plan: Plan, job: Job, *, device: str | torch.device | None = None) -> Run:
    """Apply a plan to the job's own model and optimizer, on the device the model is on.

    A job with a function for a model gets a new one, on the GPU where there is one. Where anything
    is not as it was planned for, that raises `StalePlan`, and the model is not touched.
    """
    _refuse_own_changes(job)
    with _as_it_was(job.model):
        model = build_model(dataclasses.replace(job, checkpointing="none"))
        target = _device_of(job, model, device)
        optimizer = _optimizer_of(job, model, target)
        _check_ownership(model, optimizer)
        card = _gpu_of(target)
        name, gpu = plan.made_for.job, card.name if card is not None else None
        plan.made_for.check(MadeFor.of(name, model, make_batch(job), optimizer, gpu))
        stage, undo = apply_choices(plan.choices, job, model, optimizer, device_type=target.type)
        return Run(plan, stage, target, undo)


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., Tensor] | nn.Module | None,
    batch: Any,
    *,
    budget: str | int | None = None,
    allow: str | Fidelity = Fidelity.ROUNDING,
    time_blocks: bool = False,
    **options: Any,
) -> Run:
    """Rehearse, plan and apply in one line; `options` are those of `Job` (precision, clip_norm …).

    The model stays on its device. On a GPU the budget is enforced for the whole process; without
    one it is all of the card. With `time_blocks` the options of its blocks are timed on the device
    first, where the memory of one block is free; without, a model of the card tells their seconds.
    """
    job = Job(model, loss, optimizer, batch, **options)
    _refuse_own_changes(job)
    _check_ownership(model, optimizer)
    device = _device_of(job, model, None)
    gpu = _gpu_of(device)
    timer = None
    if time_blocks:
        on_device = _moved(make_batch(job), device)
        timer = BlockTimer(job=job, model=model, optimizer=optimizer, batch=on_device)
    plan = make_plan(job, budget=budget, gpu=gpu, allow=allow, timer=timer)
    run = apply(plan, job)
    if budget is not None and gpu is not None:
        enforce(parse_bytes(budget), gpu, device)
    return run


def enforce(budget: int, gpu: GPU, device: torch.device) -> None:
    """Let PyTorch reserve no more than the budget leaves beside what no tensor shows."""
    total = torch.cuda.get_device_properties(device).total_memory
    reserved = budget - device_overhead(gpu).expected
    torch.cuda.set_per_process_memory_fraction(min(max(reserved / total, 0.0), 1.0), device)


def _moved(batch: Any, device: torch.device) -> Any:
    return tree_map(
        lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, batch
    )


@contextlib.contextmanager
def _as_it_was(model: Any) -> Iterator[None]:
    """Whatever fails inside, a given model has the mode and the number formats it came with."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    modes = [module.training for module in modules]
    buffers = [dict(module._buffers) for module in modules]
    weights = [(weight, weight.data) for module in modules for weight in module.parameters(False)]
    try:
        yield
    except BaseException:
        for module, training, own in zip(modules, modes, buffers, strict=True):
            module.training = training
            module._buffers.update(own)
        for weight, data in weights:
            weight.data = data
        raise


def _device_of(job: Job, model: nn.Module, device: str | torch.device | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    if isinstance(job.model, nn.Module):
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) != 1:
            names = ", ".join(sorted(map(str, devices))) or "none"
            raise BadInput(f"the model must be on one device to be planned for, not on {names}")
        return devices.pop()
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _optimizer_of(job: Job, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    if not isinstance(job.model, nn.Module):
        model.to(device)
    if isinstance(job.optimizer, torch.optim.Optimizer):
        return job.optimizer
    make = make_optimizer(job.optimizer) if isinstance(job.optimizer, str) else job.optimizer
    if make is None:
        raise BadInput("a run is for training: give the job an optimizer")
    return make([p for p in model.parameters() if p.requires_grad])


def _gpu_of(device: torch.device) -> GPU | None:
    return find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def _check_ownership(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Every parameter that trains must be the optimizer's, and the other way round."""
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = {id(p): path for path, p in model.named_parameters() if p.requires_grad}
    if missing := [path for key, path in trained.items() if key not in owned]:
        raise BadInput(
            f"the optimizer does not own {missing[0]}"
            + (f" and {len(missing) - 1} more parameters" if len(missing) > 1 else "")
            + "; give it all parameters that train, or freeze those"
        )
    known = {id(p) for p in model.parameters()}
    if owned - known:
        raise BadInput(
            "the optimizer owns parameters that are not the model's; was the model changed or"
            " copied after the optimizer was made?"
        )


def _refuse_own_changes(job: Job) -> None:
    """A model that is changed already, by a plan or by its own means."""
    model = job.model
    if not isinstance(model, nn.Module):
        return
    refuse_applied(model)
    if getattr(model, "is_gradient_checkpointing", False):
        raise BadInput(
            "the model checkpoints by itself already; call model.gradient_checkpointing_disable(),"
            " and oomph chooses what to recompute"
        )
