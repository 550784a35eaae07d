"""A Run: a job with a plan applied. `run.step(batch)` is one optimizer step on a global batch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from oomph.data.prefetch import Prefetcher
from oomph.data.prefetch_memory import prefetched_bytes
from oomph.errors import BadInput
from oomph.estimation import Ledgers
from oomph.gpus import GPU, find_gpu
from oomph.host.limits import check_disk, check_host_memory, host_limits
from oomph.host.scratch_file import default_folder
from oomph.job import Job, build_model, make_batch, make_optimizer
from oomph.planning.block_timer import BlockTimer
from oomph.planning.plan import MadeFor, Plan
from oomph.planning.planner import Planner, make_planner
from oomph.precision.controller import AdaptivePrecision, NotFinite, PrecisionController
from oomph.rehearsal.hidden import device_overhead
from oomph.running.adapting import Adapting
from oomph.running.applying import Applied, refuse_applied
from oomph.running.batches import Batches
from oomph.running.elastic import Elastic, Elasticity, Event
from oomph.running.evaluating import Evaluation, evaluate
from oomph.running.ladder import Ladder
from oomph.running.loading import Resumed, Stored, load, load_state
from oomph.running.out_of_memory import count_refusals, free_what_is_left, ran_out_of_memory
from oomph.running.quick_reads import quick_reads
from oomph.running.saving import Situation, Stateful, save
from oomph.running.step import train_step
from oomph.running.transaction import Transaction
from oomph.techniques.own_choices import uncompiled
from oomph.techniques.technique import Fidelity, Undo
from oomph.units import parse_bytes

#: The part of free host memory that no plan counts on: planning and loading data take some, too.
HOST_MARGIN = 0.05


class Run:
    """A model and its optimizer under a plan; `undo` gives them back as they were."""

    def __init__(self, applied: Applied, adapting: Adapting, device: torch.device) -> None:
        self.steps = 0
        self._stage = applied.stage
        self._device = device
        self._adapting = adapting
        self._transaction = Transaction(device)
        self._undo: Undo | None = applied.undo
        #: By name: what is saved and loaded with the run; see `attach`.
        self._attached: dict[str, Stateful] = {}
        self.resumed: Resumed | None = None
        #: Batches that are on the device ahead of their step; the plan must leave room for them.
        self.prefetch = 0
        self._prefetcher: Prefetcher | None = None
        #: The precision of layers, where it adapts; see `adapt_precision`.
        self.precision: PrecisionController | None = None

    @property
    def plan(self) -> Plan:
        """The plan of the next step, as far as is known before it begins."""
        return self._adapting.plan

    @property
    def events(self) -> tuple[Event, ...]:
        """Every change of the plan so far, with its cause."""
        return tuple(self._adapting.events)

    @property
    def budget(self) -> int:
        """The device memory that the run may use. Set to another one, as 12GiB, it changes the
        plan at once, or raises `DoesNotFit` and changes nothing."""
        return self._adapting.budget

    @budget.setter
    def budget(self, budget: str | int) -> None:
        self._check_usable()
        self._adapting.set_budget(self.steps, parse_bytes(budget))

    @property
    def host_bytes(self) -> int:
        """Host memory that is kept to be able to take a step back."""
        return self._transaction.host_bytes

    @property
    def model(self) -> nn.Module:
        """The user's model, with the weights of the last step."""
        self._stage.settle()
        return self._stage.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer; schedulers made for it go on working."""
        assert self._stage.optimizer is not None
        return self._stage.optimizer

    def step(self, batch: Any) -> Tensor:
        """Forward, backward and one optimizer step on a global batch; returns its loss.

        Whatever fails inside, everything is as before and the run can go on (rule 5). Where memory
        runs out, the same batch is run again under a smaller plan, until there is none:
        `OutOfMemory`. Gradients are the run's own: those it finds do not count, and it leaves none.
        """
        self._check_usable()
        self._adapting.before_step(self.steps, batch)
        if self.precision is not None:
            self.precision.before_step(self.steps, functools.partial(self._on_device, batch))
        tried = []
        while True:
            loss, failure = self._attempt_finite(batch)
            if loss is not None:
                self.steps += 1
                return loss
            self._check_usable()
            tried.append(self._adapting.rung)
            self._adapting.retreat(self.steps, failure, tried)

    def _attempt_finite(self, batch: Any) -> tuple[Tensor | None, str]:
        """An attempt; where precision adapts, the layers that make it not finite go up first."""
        if self.precision is None:
            return self._attempt(batch)
        while True:
            try:
                with self.precision.applied():
                    return self._attempt(batch)
            except NotFinite as error:
                why = str(error)
            self.precision.recover(self.steps, self._on_device(batch), why)

    def _attempt(self, batch: Any) -> tuple[Tensor | None, str]:
        """The loss of a step; or nothing, and what was said when memory ran out."""
        refusals = count_refusals(self._device)
        try:
            self._transaction.begin(self._stage)
            self.optimizer.zero_grad(set_to_none=True)
            with self._reading():
                loss = train_step(self._stage, self._on_device(batch))
            self._transaction.commit(self._stage)
            return loss, ""
        except BaseException as error:
            if not ran_out_of_memory(error, count_refusals(self._device) - refusals):
                self._transaction.roll_back(self._stage)
                raise
            failure = f"{type(error).__name__}: {error}"
        # Outside the `except`: what the error's traceback held is gone (rule 5).
        self._transaction.roll_back(self._stage)
        free_what_is_left(self._device)
        return None, failure

    def _reading(self) -> AbstractContextManager[None]:
        """How a step reads numbers of the device: past all copies, where there are large ones."""
        copies = self._stage.in_backward is not None or self._stage.host is not None
        return quick_reads(self._device) if copies else contextlib.nullcontext()

    def _on_device(self, batch: Any) -> Any:
        job = dataclasses.replace(self._stage.job, batch=batch)
        return _moved(make_batch(job), self._device)

    def evaluate(
        self, batches: Iterable[Any], metric: Callable[[Any, Any], Any] | None = None
    ) -> Evaluation:
        """The loss over these batches, in evaluation and inside the plan's memory.

        `metric(output, part)` is called with the model's output for each micro-batch and that part
        of the batch, both on the host; what it returns is kept.
        """
        self._check_usable()
        precision = self.precision
        with precision.applied() if precision is not None else contextlib.nullcontext():
            return evaluate(
                self._stage, batches, metric, device=self._device, planned=self.plan.made_for.batch
            )

    def adapt_precision(self, how: AdaptivePrecision | None = None) -> PrecisionController:
        """From now on, let each layer's precision follow the model's behaviour.

        Layers begin at the job's precision. Now and then some samples are run in fp32, too: where
        gradients are close enough, layers go down; where they are too far apart, or a step is not
        finite, those that are the cause go up, and such a step is taken back and run again. It is
        saved with the run; call this after a load, too.
        """
        self._check_usable()
        if self.precision is not None:
            raise BadInput("the precision of this run adapts already")
        precision = PrecisionController(
            how or AdaptivePrecision(), self._stage, self._device, self.plan.choices
        )
        try:
            self.attach("precision", precision)
        except BaseException:
            precision.stop()
            raise
        self.precision = precision
        return precision

    def attach(self, name: str, stateful: Stateful) -> None:
        """Save and load this with the run: a scheduler, or anything with a state dict.

        After a load it is given the state that was saved under its name.
        """
        if self.resumed is not None and name in self.resumed.waiting:
            load_state(name, stateful, self.resumed.waiting[name])
            del self.resumed.waiting[name]
        self._attached[name] = stateful

    def batches(self, loader: Iterable[Any]) -> Batches:
        """The loader's batches; a run that is resumed goes on with the one that would be next.

        With `run.prefetch`, which `fit` sets, so many of them are on the device before their step.
        """
        if self._prefetcher is not None:
            self._prefetcher.close()
        if self.prefetch:
            loader = self._prefetcher = Prefetcher(loader, self._device, self.prefetch)
        batches = Batches(loader, self._device)
        self.attach("data", batches)
        return batches

    @property
    def waited(self) -> tuple[float, ...]:
        """Seconds that the device waited for each of its prefetched batches."""
        return self._prefetcher.waited if self._prefetcher is not None else ()

    def save(self, folder: str | Path, *, keep: int = 2, extra: Any = None) -> Path:
        """Write a checkpoint to the folder, and leave the last `keep` in it; returns its path.

        It holds everything the next steps depend on, and `extra`, for the user. The process may be
        killed at any moment: the last checkpoint or the new one is there, and whole.
        """
        self._check_usable()
        return save(self._situation(extra), Path(folder), keep=keep)

    def load(self, path: str | Path | Stored) -> Resumed:
        """Go on from a checkpoint, or from the newest one of a folder.

        The next steps are those of the saved run, to the bit under the same plan. A checkpoint that
        is damaged or another model's is refused, and nothing is changed.
        """
        if self._undo is None:
            raise BadInput("this run is over: its plan was undone")
        stored = path if isinstance(path, Stored) else Stored(Path(path))
        self._transaction = Transaction(self._device)  # the last one holds what is replaced now
        self.resumed = load(stored, self._situation())
        self.steps = self.resumed.step
        return self.resumed

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
        """Take the plan back; model and optimizer keep what they learned.

        Where host memory has no room for what is on the disk, that is said and the run can go on:
        it can be saved.
        """
        if self._undo is not None and self._stage.host is not None:
            self._stage.host.check_undo()
        undo, self._undo = self._undo, None
        if self._prefetcher is not None:
            self._prefetcher.close()
        if self.precision is not None:
            self.precision.stop()
        if undo is not None:
            undo()

    def _situation(self, extra: Any = None) -> Situation:
        self._stage.settle()
        return Situation(
            plan=self.plan,
            stage=self._stage,
            device=self._device,
            step=self.steps,
            states=self._attached,
            extra=extra,
        )

    def _check_usable(self) -> None:
        if self._undo is None:
            raise BadInput("this run is over: its plan was undone")
        pieces = self._stage.pieces
        if pieces is not None and pieces.half_done:
            raise BadInput(
                "the last step broke off inside the optimizer, where some weights were stepped"
                " already and others were not: load your last checkpoint, with `run.load` or after"
                " undoing the run"
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


def apply(
    plan: Plan,
    job: Job,
    *,
    device: str | torch.device | None = None,
    elastic: bool | Elastic = False,
    disk: str | Path | None = None,
) -> Run:
    """Apply a plan to the job's own model and optimizer, on the device the model is on.

    With another `device` it comes there, as far as the plan says. A job with a function for a model
    gets a new one, on the GPU where there is one. Where anything is not as it was planned for, that
    raises `StalePlan`, and the model is not touched. `elastic` and `disk` are as for `fit`.
    """
    return _apply(plan, job, device, elastic, disk)


def _apply(
    plan: Plan,
    job: Job,
    device: str | torch.device | None,
    elastic: bool | Elastic,
    disk: str | Path | None,
    planner: Planner | None = None,
) -> Run:
    """Apply a plan; `planner` is who made it, if that is known, and makes others for the run."""
    _refuse_own_changes(job)
    with _as_it_was(job.model) as forget_unchanged:
        model = build_model(dataclasses.replace(job, checkpointing="none"))
        forget_unchanged()
        target = _device_of(job, model, device)
        if not isinstance(job.model, nn.Module) and plan.choices.optimizer_on == "gpu":
            model.to(target)
        optimizer = _optimizer_of(job, model)
        _check_ownership(model, optimizer)
        card = _gpu_of(target)
        name, gpu = plan.made_for.job, card.name if card is not None else None
        plan.made_for.check(MadeFor.of(name, model, make_batch(job), optimizer, gpu))
        folder = Path(disk) if disk is not None else default_folder()
        _check_room(plan, folder, leaves_host=_leaves_host(model, target))
        own = dataclasses.replace(job, model=model, optimizer=optimizer)
        free = planner.host if planner is not None else free_host_memory(model, target)
        host = max(free, plan.predicted.host) if free is not None else None
        make_another = functools.partial(make_planner, budget=plan.budget, gpu=card, host=host)
        ladder = Ladder(planner or make_another(own), plan)
        elasticity = None
        if elastic:
            ladder.make_all()
            how = elastic if isinstance(elastic, Elastic) else Elastic()
            elasticity = Elasticity(how, target, card)
        applied = Applied(plan.choices, own, model, optimizer, device_type=target.type, disk=folder)

        def enforce_here(budget: int) -> None:
            if card is not None:
                enforce(budget, card, target)

        adapting = Adapting(
            applied,
            ladder,
            planner_for=make_another,
            elasticity=elasticity,
            enforce=enforce_here,
            device=target,
        )
        return Run(applied, adapting, target)


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., Tensor] | nn.Module | None,
    batch: Any,
    *,
    budget: str | int | None = None,
    allow: str | Fidelity = Fidelity.ROUNDING,
    device: str | torch.device | None = None,
    time_blocks: bool = False,
    elastic: bool | Elastic = False,
    prefetch: int = 0,
    disk: str | Path | None = None,
    **options: Any,
) -> Run:
    """Rehearse, plan and apply in one line; `options` are those of `Job` (precision, clip_norm …).

    The model runs on its device, or on `device`: one that is on the CPU, because it is too large
    for the card, comes to the card as far as the plan says. There the budget is enforced for the
    whole process; without one it is all of the card. With `time_blocks` the options of its blocks
    are timed on the device first, where the memory of one block is free; without, a model of the
    card tells their seconds.

    An `elastic` run has plans for less memory made ahead, down to the leanest. Before each step it
    looks at the memory there is, and goes to a smaller plan at once where there is less; back after
    a while where there is more. It also plans for longer batches when they come.

    The plan leaves room for `prefetch` batches that `run.batches` puts on the device ahead. What
    leaves the GPU stays inside the host memory that is free; optimizer state, masters, gradients,
    weights and what blocks save with no room there wait on the disk of the folder `disk`, by
    default that of $TMPDIR or else of /var/tmp.
    """
    model = uncompiled(model)
    job = Job(model, loss, optimizer, batch, **options)
    _refuse_own_changes(job)
    _check_ownership(model, optimizer)
    target = _device_of(job, model, device)
    gpu = _gpu_of(target)
    timer = None
    if time_blocks:
        on_device = _moved(make_batch(job), target)
        timer = BlockTimer(job=job, model=model, optimizer=optimizer, batch=on_device)
    room = _room_beside(prefetch, job, gpu, budget)
    host = free_host_memory(model, target)
    planner = make_planner(job, budget=room, gpu=gpu, allow=allow, timer=timer, host=host)
    plan = planner.plan()
    run = _apply(plan, job, target, elastic, disk, planner)
    run.prefetch = prefetch
    if budget is not None and gpu is not None:
        enforce(parse_bytes(budget), gpu, target)
    return run


def resume(
    path: str | Path,
    job: Job,
    *,
    device: str | torch.device | None = None,
    elastic: bool | Elastic = False,
    disk: str | Path | None = None,
) -> Run:
    """Go on from a checkpoint, or the newest one of a folder, under the plan it was saved under.

    To go on under another plan, apply that one and `load` the checkpoint. `device`, `elastic` and
    `disk` are as for `apply`.
    """
    stored = Stored(Path(path))
    run = apply(stored.plan(), job, device=device, elastic=elastic, disk=disk)
    try:
        run.load(stored)
    except BaseException:
        run.undo()
        raise
    return run


def free_host_memory(model: Any, device: torch.device) -> int | None:
    """Host memory that a plan may take on this machine; None on the CPU, where nothing leaves."""
    if device.type == "cpu":
        return None
    there = _leaves_host(model, device) if isinstance(model, nn.Module) else 0
    return max(int((1 - HOST_MARGIN) * host_limits().memory) + there, 1)


def enforce(budget: int, gpu: GPU, device: torch.device) -> None:
    """Let PyTorch reserve no more than the budget leaves beside what no tensor shows."""
    total = torch.cuda.get_device_properties(device).total_memory
    reserved = budget - device_overhead(gpu).expected
    fraction = min(max(reserved / total, 0.0), 1.0)
    # Unlike its neighbours, this one wants to be told which of the cards.
    index = device.index if device.index is not None else torch.cuda.current_device()
    torch.cuda.set_per_process_memory_fraction(fraction, index)


def _leaves_host(model: nn.Module, device: torch.device) -> int:
    """Bytes of weights that are on the host already: what waits there needs no other memory."""
    return sum(p.nbytes for p in model.parameters() if p.device.type != device.type)


def _check_room(plan: Plan, folder: Path, *, leaves_host: int) -> None:
    """Refuse what host memory or the disk cannot hold, before anything is allocated."""
    host, disk = plan.predicted.host, plan.predicted.disk
    if disk:
        check_disk(disk, folder, "the plan")
        if host_limits(folder).disk_is_memory:
            host += disk
    check_host_memory(max(host - leaves_host, 0), "the plan")


def _room_beside(
    prefetch: int, job: Job, gpu: GPU | None, budget: str | int | None
) -> str | int | None:
    """What prefetched batches leave of a budget."""
    whole = budget if budget is not None or gpu is None else gpu.memory
    if not prefetch or whole is None:
        return budget
    return max(parse_bytes(whole) - prefetched_bytes(make_batch(job), prefetch), 1)


def _moved(batch: Any, device: torch.device) -> Any:
    return tree_map(
        lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, batch
    )


@contextlib.contextmanager
def _as_it_was(model: Any) -> Iterator[Callable[[], None]]:
    """Whatever fails inside, a given model has the mode and the number formats it came with.

    Once its formats are what they will be, what is given is to be called: weights that did not
    change are not held on to, so that whoever moves them gets their memory back.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    modes = [module.training for module in modules]
    buffers = [dict(module._buffers) for module in modules]
    weights = [(weight, weight.data) for module in modules for weight in module.parameters(False)]

    def forget_unchanged() -> None:
        weights[:] = [(weight, data) for weight, data in weights if weight.dtype != data.dtype]

    try:
        yield forget_unchanged
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


def _optimizer_of(job: Job, model: nn.Module) -> torch.optim.Optimizer:
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
