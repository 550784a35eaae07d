"""A Run: a job with a plan applied. `run.step(batch)` is one optimizer step on a global batch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import CheckpointError

from oomph.data.prefetch import Prefetcher
from oomph.data.prefetch_memory import prefetched_bytes
from oomph.engine.applying import Applied, refuse_applied
from oomph.engine.evaluating import Evaluation, evaluate
from oomph.engine.one_at_a_time import OneAtATime
from oomph.engine.out_of_memory import count_refusals, free_what_is_left, ran_out_of_memory
from oomph.engine.quick_reads import quick_reads
from oomph.engine.step import train_step
from oomph.engine.transaction import Transaction
from oomph.errors import BadInput, NotRepeatable, StepBroken, SteppedTooEarly
from oomph.hardware import GPU, find_gpu
from oomph.jobs.description import describe_job
from oomph.jobs.job import (
    Job,
    build_model,
    make_batch,
    make_optimizer,
    plain_batch,
    refuse_scripted,
)
from oomph.jobs.preexisting_settings import uncompiled
from oomph.memory.limits import check_disk, check_host_memory, host_limits
from oomph.memory.scratch_file import default_folder
from oomph.plans.fidelity import Fidelity
from oomph.plans.ledgers import Ledgers
from oomph.plans.plan import Plan
from oomph.precision.controller import AdaptivePrecision, NotFinite, PrecisionController
from oomph.process.interrupts import interrupts
from oomph.rehearsal.hidden import device_overhead
from oomph.runs.adapting import Adapting
from oomph.runs.batches import Batches
from oomph.runs.elastic import Elastic, Elasticity, Event, log
from oomph.runs.fallback_plans import FallbackPlans
from oomph.runs.loading import Resumed, Stored, load, load_state
from oomph.runs.saving import Situation, Stateful, save
from oomph.search.block_timer import BlockTimer
from oomph.search.planner import Planner, make_planner
from oomph.splitting import catch_up, prove_split, prove_split_of_another, skeleton
from oomph.techniques.autocast import training_modes
from oomph.techniques.loss_split import LossSplit
from oomph.techniques.micro_batch import ADVICE, TENSOR, LossChanged
from oomph.techniques.technique import Undo
from oomph.techniques.zero_grad import why_gradients_stay
from oomph.torch_compat.modules import buffers_of, own_parameters
from oomph.torch_compat.pytree import tree_map
from oomph.units import parse_bytes

#: The share of free host memory left for planning and data loading.
HOST_MARGIN = 0.05


_BROKEN = (
    "the last step broke off inside the optimizer, where some weights were stepped already and"
    " others were not: load your last checkpoint, with `run.load` or after undoing the run"
)


class Run:
    """A model and its optimizer under a plan; `undo` restores them."""

    def __init__(
        self,
        applied: Applied,
        adapting: Adapting,
        device: torch.device,
        skeleton: Job | None = None,
    ) -> None:
        self.steps = 0
        self._turns = OneAtATime()
        self._stage = applied.stage
        self._device = device
        self._adapting = adapting
        #: The job as it was before the plan, to analyse its loss again if that changes.
        self._skeleton = skeleton
        self._evaluation_split: LossSplit | None = None
        self._transaction = Transaction(device)
        self._undo: Undo | None = applied.undo
        #: By name: objects saved and loaded with the run; see `attach`.
        self._attached: dict[str, Stateful] = {}
        self.resumed: Resumed | None = None
        #: Number of batches moved to the device ahead of their step; the plan must leave room for
        #: them.
        self.prefetch = 0
        self._prefetcher: Prefetcher | None = None
        #: Controls the precision of layers, if it adapts; see `adapt_precision`.
        self.precision: PrecisionController | None = None

    @property
    def plan(self) -> Plan:
        """The plan of the next step, as far as known before it begins."""
        return self._adapting.plan

    @property
    def events(self) -> tuple[Event, ...]:
        """Every change of the plan so far, with its cause."""
        return tuple(self._adapting.events)

    @property
    def budget(self) -> int:
        """The device memory that the run may use. Setting it, for example to 12GiB, changes the
        plan at once, or raises `DoesNotFit` and changes nothing."""
        return self._adapting.budget

    @budget.setter
    def budget(self, budget: str | int) -> None:
        with interrupts.held(), self._turns.doing("setting run.budget"), self._modes():
            self._check_usable()
            self._adapting.set_budget(self.steps, parse_bytes(budget))

    @property
    def host_bytes(self) -> int:
        """Host memory used for copies that allow a step to be rolled back."""
        return self._transaction.host_bytes

    @property
    def model(self) -> nn.Module:
        """The user's model, with the weights after the last step."""
        self._turns.check_reader("run.model")
        self._stage.settle()
        return self._stage.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer; schedulers made for it keep working."""
        assert self._stage.optimizer is not None
        return self._stage.optimizer

    def step(self, batch: Any) -> Tensor:
        """Forward, backward and one optimizer step on a global batch; returns its loss.

        If anything inside fails, the run is restored to its state before the step and can go on
        (rule 5). Exceptions from signals, such as Ctrl-C, are raised between the parts of the step,
        which is then rolled back; once the optimizer has begun to step, they are raised after the
        step, with a note. If memory runs out, the batch is repeated under smaller and smaller
        plans, until there are none left: `OutOfMemory`. The run manages gradients itself: it
        ignores existing ones and leaves none.

        A run does one thing at a time: a call from another thread meanwhile raises `RunBusy`.
        """
        with interrupts.held(), self._turns.doing("run.step"), self._modes():
            loss = self._step(batch)
            interrupts.add_note(f"the step that this came in was made: it was step {self.steps}")
            return loss

    def _modes(self) -> AbstractContextManager[None]:
        return training_modes(self._stage.job.precision, self._stage.device_type)

    def _step(self, batch: Any) -> Tensor:
        self._check_usable()
        batch = plain_batch(batch)
        self._adapting.before_step(self.steps, batch)
        if self.precision is not None:
            self.precision.before_step(self.steps, functools.partial(self._on_device, batch))
        tried = []
        while True:
            self._know_how_to_split(batch)
            loss, failure = self._attempt_as_known(batch)
            if loss is not None:
                self.steps += 1
                return loss
            self._check_usable()
            tried.append(self._adapting.fallback)
            self._adapting.retreat(self.steps, failure, tried)

    def _attempt_as_known(self, batch: Any) -> tuple[Tensor | None, str]:
        """Attempt a step; if its loss is computed differently than before, analyse that first."""
        has_looked = False
        while True:  # once, and once more for each branch taken for the first time
            try:
                return self._attempt_in_time(batch)
            except LossChanged as changed:
                if not has_looked:
                    self._look_at_loss_again(batch, changed)
                elif not changed.doubts:
                    raise
                has_looked = True
                assert self._stage.weigher is not None
                self._stage.weigher.accept(changed.doubts)

    def _know_how_to_split(self, batch: Any) -> None:
        """Find out how to split batches: the current plan may be the first that does."""
        weigher, job, choices = self._stage.weigher, self._skeleton, self.plan.choices
        if weigher is None or job is None or weigher.split is not None:
            return
        if choices.micro_batch in (None, job.micro_batch):
            return
        weigher.split = _split_or_refuse(
            dataclasses.replace(job, batch=batch), _gpu_of(self._device)
        )

    def _look_at_loss_again(self, batch: Any, changed: LossChanged) -> None:
        """A part's forward made other calls than the one that was analysed: analyse it again."""
        weigher, job = self._stage.weigher, self._skeleton
        if weigher is None or job is None:
            # A new branch is tried on some samples, as nothing else is known about it.
            if changed.doubts and not any(
                isinstance(one, tuple) and one[0] == TENSOR for one in changed.doubts
            ):
                return
            raise changed
        log.info("the loss is computed otherwise than before: looking at it again")
        assert isinstance(job.model, nn.Module)
        catch_up(job.model, self._stage.model)
        split = prove_split_of_another(
            dataclasses.replace(job, batch=batch),
            _gpu_of(self._device),
            weigher.split,
            choices=self.plan.choices,
        )
        if split.whole_because:
            raise BadInput(
                "the loss is computed otherwise than when the plan was made, and its batch must not"
                f" be split any more: {split.whole_because}; undo the run and plan again"
            ) from changed
        weigher.look_again(split)

    def _attempt_in_time(self, batch: Any) -> tuple[Tensor | None, str]:
        """Attempt a step; repeat it if a weight was stepped before its last use."""
        while True:  # at most once per weight
            try:
                return self._attempt_finite(batch)
            except SteppedTooEarly as error:
                if self._stage.host is not None and self._stage.host.dirty:
                    raise
                log.info("%s", error)

    def _attempt_finite(self, batch: Any) -> tuple[Tensor | None, str]:
        """Attempt a step; with adaptive precision, raise that of layers that make it non-finite."""
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
        """The loss of a step; or None, and the error message when memory ran out."""
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
                if self._is_broken and isinstance(error, Exception):
                    raise StepBroken(f"{_BROKEN} (it broke off for: {error})") from error
                if self._is_broken:
                    error.add_note(_BROKEN)
                if isinstance(error, CheckpointError):
                    raise NotRepeatable(_not_the_same(error)) from error
                raise
            failure = f"{type(error).__name__}: {error}"
        # Outside the `except`, so that the error's traceback is gone (rule 5).
        self._transaction.roll_back(self._stage)
        free_what_is_left(self._device)
        if self._is_broken:
            raise StepBroken(f"{_BROKEN} (it ran out of memory: {failure})")
        return None, failure

    def _reading(self) -> AbstractContextManager[None]:
        """Reads of single numbers that bypass queued copies, if the plan has large copies."""
        copies = self._stage.in_backward is not None or self._stage.host is not None
        return quick_reads(self._device) if copies else contextlib.nullcontext()

    def _on_device(self, batch: Any) -> Any:
        job = dataclasses.replace(self._stage.job, batch=batch)
        return _moved(make_batch(job), self._device)

    def evaluate(
        self, batches: Iterable[Any], metric: Callable[[Any, Any], Any] | None = None
    ) -> Evaluation:
        """The loss over these batches in evaluation mode, within the plan's memory.

        `metric(output, part)` is called with the model's output for each micro-batch and that part
        of the batch, both on the host; the results are returned.
        """
        with interrupts.held(), self._turns.doing("run.evaluate"), self._modes():
            return self._evaluate(batches, metric)

    def _evaluate(
        self, batches: Iterable[Any], metric: Callable[[Any, Any], Any] | None
    ) -> Evaluation:
        self._check_usable()
        precision = self.precision
        with precision.applied() if precision is not None else contextlib.nullcontext():
            return evaluate(
                self._stage,
                batches,
                metric,
                device=self._device,
                planned=self.plan.made_for.batch,
                find_split=self._split_in_evaluation,
            )

    def _split_in_evaluation(self, batch: Any, *, anew: bool = False) -> LossSplit | None:
        """How a batch's loss in evaluation is computed from those of its parts."""
        if self._evaluation_split is not None and not anew:
            return self._evaluation_split
        job, weigher = self._skeleton, self._stage.weigher
        if job is None:
            return weigher.split if weigher is not None else None
        job = dataclasses.replace(job, batch=batch)
        gpu, choices = _gpu_of(self._device), self.plan.choices
        before = weigher.split if weigher is not None else None
        split = prove_split_of_another(job, gpu, before, evaluating=True, choices=choices)
        if split.whole_because:
            raise BadInput(
                "the loss of this batch cannot be computed in parts in evaluation"
                f" ({split.whole_because}): evaluate with batches that are no larger than the"
                f" plan's parts, or {ADVICE}"
            )
        self._evaluation_split = split
        return split

    def adapt_precision(self, how: AdaptivePrecision | None = None) -> PrecisionController:
        """From now on, adapt each layer's precision to the model's behaviour.

        Layers begin at the job's precision. Now and then some samples are run in fp32 for
        comparison: where gradients are close enough, layers go down in precision; where they are
        too far apart, or a step is not finite, the layers that cause it go up, and such a step is
        rolled back and repeated. The precision is saved with the run; call this after a load, too.
        """
        with interrupts.held(), self._turns.doing("run.adapt_precision"), self._modes():
            return self._adapt_precision(how)

    def _adapt_precision(self, how: AdaptivePrecision | None) -> PrecisionController:
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
        """Save and load this object with the run: a scheduler, or anything with a state dict.

        After a load it is given the state that was saved under its name.
        """
        if self.resumed is not None and name in self.resumed.waiting:
            load_state(name, stateful, self.resumed.waiting[name])
            del self.resumed.waiting[name]
        self._attached[name] = stateful

    def batches(self, loader: Iterable[Any]) -> Batches:
        """The loader's batches; a resumed run continues with the one that would be next.

        `run.prefetch`, which `fit` sets, is how many batches are moved to the device ahead of their
        step.
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
        """Write a checkpoint to the folder, keep the last `keep` there, and return its path.

        It holds everything that the next steps depend on, and `extra` for the user. Even if the
        process is killed, the last checkpoint or the new one is there, complete.
        """
        with interrupts.held(), self._turns.doing("run.save"):
            self._check_usable()
            return save(self._situation(extra), Path(folder), keep=keep)

    def load(self, path: str | Path | Stored) -> Resumed:
        """Continue from a checkpoint, or from the newest one of a folder.

        The next steps are those of the saved run, bit for bit under the same plan. A checkpoint
        that is damaged or of another model is refused, and nothing is changed.
        """
        with interrupts.held(), self._turns.doing("run.load"):
            return self._load(path)

    def _load(self, path: str | Path | Stored) -> Resumed:
        if self._undo is None:
            raise BadInput("this run is over: its plan was undone")
        stored = path if isinstance(path, Stored) else Stored(Path(path))
        self._transaction = Transaction(self._device)  # the old one holds what is replaced now
        with self._broken_step_forgotten():
            self.resumed = load(stored, self._situation())
        self.steps = self.resumed.step
        return self.resumed

    @contextlib.contextmanager
    def _broken_step_forgotten(self) -> Iterator[None]:
        """Clears the mark of a broken step, unless the loading inside fails."""
        host = self._stage.host
        was_broken = host is not None and host.dirty
        if host is not None and was_broken:
            host.forget_step()
        try:
            yield
        except BaseException:
            if host is not None:
                host.dirty = was_broken
            raise

    def measured(self) -> Ledgers | None:
        """The process's peak memory so far, as counted by the GPU's allocator."""
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
        """Undo the plan; model and optimizer keep what they learned.

        If host memory has no room for what is on disk, this raises an error and the run can go on:
        it can still be saved.
        """
        with interrupts.held(), self._turns.doing("run.undo"):
            self._take_back()

    def _take_back(self) -> None:
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
        if self._is_broken:
            raise StepBroken(_BROKEN)

    @property
    def _is_broken(self) -> bool:
        """Whether the last step broke off with some weights stepped, beyond rolling back."""
        pieces, host = self._stage.pieces, self._stage.host
        return (pieces is not None and pieces.half_done) or (host is not None and host.dirty)

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
    """Apply a plan to the job's own model and optimizer, on the model's device.

    With another `device`, the model is moved there as far as the plan says. If the job has a
    function for a model, it builds a new one, on the GPU if there is one. If anything differs from
    what was planned for, this raises `StalePlan` and does not touch the model. `elastic` and `disk`
    are as for `fit`.
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
    """Apply a plan; `planner`, which made it, if known, also makes the run's other plans."""
    _refuse_own_changes(job)
    target = _device_of(job, device)
    with (
        training_modes(job.precision, target.type),
        _as_it_was(job.model) as forget_unchanged,
    ):
        model = build_model(dataclasses.replace(job, checkpointing="none"), as_given=True)
        if not model.training:
            log.warning(
                "the model is in evaluation mode, and is trained so, with no dropout and no batch"
                " statistics: call model.train() first if that is not meant"
            )
        forget_unchanged()
        if not isinstance(job.model, nn.Module) and plan.choices.optimizer_on == "gpu":
            model.to(target)
        optimizer = _optimizer_of(job, model)
        _refuse_closures(optimizer)
        _refuse_kept_gradients(optimizer)
        _check_ownership(model, optimizer)
        card = _gpu_of(target)
        name, gpu = plan.made_for.job, card.name if card is not None else None
        plan.made_for.check(describe_job(name, model, make_batch(job), optimizer, gpu))
        folder = Path(disk) if disk is not None else default_folder()
        _check_room(plan, folder, leaves_host=_leaves_host(model, target))
        own = dataclasses.replace(job, model=model, optimizer=optimizer)
        split = _split_of(plan, own, planner, card)
        bones = skeleton(own) if _is_read_from_graph(own) else None
        free = planner.host if planner is not None else free_host_memory(model, target)
        host = max(free, plan.predicted.host) if free is not None else None
        make_another = functools.partial(make_planner, budget=plan.budget, gpu=card, host=host)
        fallbacks = FallbackPlans(planner or make_another(own), plan)
        elasticity = None
        if elastic:
            fallbacks.make_all()
            how = elastic if isinstance(elastic, Elastic) else Elastic()
            elasticity = Elasticity(how, target, card)
        with interrupts.held():
            applied = Applied(
                plan.choices, own, model, optimizer, device_type=target.type, disk=folder
            )
        assert applied.stage.weigher is not None
        applied.stage.weigher.split = split
        applied.stage.weigher.watches = True

        def enforce_here(budget: int) -> None:
            if card is not None:
                enforce(budget, card, target)

        adapting = Adapting(
            applied,
            fallbacks,
            planner_for=make_another,
            elasticity=elasticity,
            enforce=enforce_here,
            device=target,
        )
        return Run(applied, adapting, target, bones)


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
    """Rehearse, plan and apply in one call; `options` are those of `Job` (precision, clip_norm …).

    The model runs on its device, or on `device`: a model that is on the CPU because it is too large
    for the GPU is moved to the GPU as far as the plan says. On a GPU, the budget is enforced for
    the whole process; by default it is all of the GPU's memory. With `time_blocks`, the options of
    its blocks are timed on the device first, which needs free memory for one block; otherwise their
    times are predicted from the GPU's specifications.

    An `elastic` run makes plans for less memory ahead, down to the leanest. Before each step it
    checks the available memory: with less it switches to a smaller plan at once, with more it
    switches back after a while. It also makes plans for longer batches when they come.

    The plan leaves room for `prefetch` batches that `run.batches` moves to the device ahead.
    Offloaded data stays within the free host memory; optimizer state, masters, gradients, weights
    and what blocks save that do not fit there go to disk in the folder `disk`, by default $TMPDIR,
    or else /var/tmp.
    """
    model = uncompiled(model)
    job = Job(model, loss, optimizer, batch, **options)
    _refuse_own_changes(job)
    _check_ownership(model, optimizer)
    target = _device_of(job, device)
    gpu = _gpu_of(target)
    timer = None
    with training_modes(job.precision, target.type):
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
    """Continue from a checkpoint, or the newest one of a folder, under the plan it was saved under.

    To continue under another plan, apply that one and `load` the checkpoint. `device`, `elastic`
    and `disk` are as for `apply`.
    """
    stored = Stored(Path(path))
    run = apply(stored.plan(), job, device=device, elastic=elastic, disk=disk)
    try:
        run.load(stored)
    except BaseException:
        run.undo()
        raise
    return run


def _split_of(plan: Plan, job: Job, planner: Planner | None, gpu: GPU | None) -> LossSplit | None:
    """How the losses of parts make the batch's; raises if the plan splits what must stay whole.

    None if the user says so, or if nothing is split so far.
    """
    if not _is_read_from_graph(job):
        return None
    if planner is not None and planner.made_for is not None:
        split = planner.found.split
    elif plan.choices.micro_batch is not None:
        split = prove_split(job, gpu)
    else:
        return None
    if split is None or not split.whole_because:
        return split
    if plan.choices.micro_batch not in (None, job.micro_batch):
        raise _must_stay_whole(split)
    return None


def _split_or_refuse(job: Job, gpu: GPU | None) -> LossSplit:
    split = prove_split(job, gpu)
    if split.whole_because:
        raise _must_stay_whole(split)
    return split


def _must_stay_whole(split: LossSplit) -> BadInput:
    return BadInput(
        f"the batch must not be split into micro-batches: {split.whole_because}; plan again,"
        f" or {ADVICE}"
    )


def _is_read_from_graph(job: Job) -> bool:
    """Whether only the graph of the forward shows how the batch may be split."""
    return job.normalizer is None and job.whole_batch is None


def free_host_memory(model: Any, device: torch.device) -> int | None:
    """Host memory that a plan may take on this machine; None on the CPU, without offloading."""
    if device.type == "cpu":
        return None
    there = _leaves_host(model, device) if isinstance(model, nn.Module) else 0
    return max(int((1 - HOST_MARGIN) * host_limits().memory) + there, 1)


def enforce(budget: int, gpu: GPU, device: torch.device) -> None:
    """Limit what PyTorch may reserve to the budget minus memory that no tensor accounts for."""
    total = torch.cuda.get_device_properties(device).total_memory
    reserved = budget - device_overhead(gpu).expected
    fraction = min(max(reserved / total, 0.0), 1.0)
    # Unlike similar functions, this one needs an explicit device index.
    index = device.index if device.index is not None else torch.cuda.current_device()
    torch.cuda.set_per_process_memory_fraction(fraction, index)


def _leaves_host(model: nn.Module, device: torch.device) -> int:
    """Bytes of weights already on the host: offloading them takes no more host memory."""
    return sum(p.nbytes for p in model.parameters() if p.device.type != device.type)


def _check_room(plan: Plan, folder: Path, *, leaves_host: int) -> None:
    """Raise an error before anything is allocated if host memory or the disk is too small."""
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
    """The batch on a device, with inference tensors cloned so that autograd can save them."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        there = leaf.to(device, non_blocking=True)
        return there.clone() if there.is_inference() else there

    return tree_map(move, batch)


@contextlib.contextmanager
def _as_it_was(model: Any) -> Iterator[Callable[[], None]]:
    """If anything inside fails, restore the given model's training mode and dtypes.

    The yielded function is called once the dtypes are final: it releases unchanged weights, so that
    their memory is freed when they are moved.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    modes = [module.training for module in modules]
    buffers = [dict(buffers_of(module)) for module in modules]
    weights = [(weight, weight.data) for module in modules for weight in own_parameters(module)]

    def forget_unchanged() -> None:
        weights[:] = [(weight, data) for weight, data in weights if weight.dtype != data.dtype]

    try:
        yield forget_unchanged
    except BaseException:
        for module, training, own in zip(modules, modes, buffers, strict=True):
            module.training = training
            buffers_of(module).update(own)
        for weight, data in weights:
            weight.data = data
        raise


def _device_of(job: Job, device: str | torch.device | None) -> torch.device:
    if device is not None:
        return _usable(torch.device(device))
    if isinstance(job.model, nn.Module):
        devices = {parameter.device for parameter in job.model.parameters()}
        if len(devices) != 1:
            names = ", ".join(sorted(map(str, devices))) or "none"
            raise BadInput(f"the model must be on one device to be planned for, not on {names}")
        return _usable(devices.pop())
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _usable(device: torch.device) -> torch.device:
    if device.type not in ("cpu", "cuda"):
        said = ", where its weights have no numbers" if device.type == "meta" else ""
        raise BadInput(f"the model is on {device.type}{said}: runs are for the CPU and CUDA")
    return device


def _optimizer_of(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    if isinstance(job.optimizer, torch.optim.Optimizer):
        return job.optimizer
    make = make_optimizer(job.optimizer) if isinstance(job.optimizer, str) else job.optimizer
    if make is None:
        raise BadInput("a run is for training: give the job an optimizer")
    return make([p for p in model.parameters() if p.requires_grad])


def _refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that computes the loss itself, as often as it likes."""
    # Of the class: schedulers wrap the object's own, and leave `self` in its signature.
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise BadInput(
            f"a step of {type(optimizer).__name__} has to be given a closure, with which it"
            " computes the loss itself; a run computes it once for each step: choose another"
            " optimizer"
        )


def _refuse_kept_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that goes on with gradients of the step before."""
    if why := why_gradients_stay(optimizer):
        raise BadInput(
            f"{why}, and a run begins each step without gradients: keep in the optimizer's state"
            " what a later step needs"
        )


def _gpu_of(device: torch.device) -> GPU | None:
    return find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def _not_the_same(error: CheckpointError) -> str:
    """What PyTorch says of a forward that ran again and saved something else, for who reads it."""
    what = str(error).strip().partition("\n")[0].removeprefix("torch.utils.checkpoint: ")
    return (
        "a block cannot be recomputed: when its forward runs again, it does not do the same"
        f" ({what}). The step was not made; have the plan keep its blocks, or plan again"
    )


def _check_ownership(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Check that the optimizer owns every trainable parameter and none of another model."""
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
            "the optimizer owns parameters that are not the model's: put a criterion that has"
            " parameters into one module with the model, whose forward returns the loss; or was the"
            " model changed or copied after the optimizer was made?"
        )


def _refuse_own_changes(job: Job) -> None:
    """Refuse a model that was already changed, by a plan or in other ways."""
    model = job.model
    if not isinstance(model, nn.Module):
        return
    refuse_applied(model)
    refuse_scripted(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise BadInput(
                f"{name} takes its size from the first batch it sees: run one batch through the"
                " model before it is planned for"
            )
        if tensor.is_inference():
            raise BadInput(
                f"{name} was made in inference mode, in which nothing can be trained: build or load"
                " the model outside of it"
            )
