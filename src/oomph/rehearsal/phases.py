"""The phases in which users run out of memory, rehearsed one after the other."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._pytree import tree_map

from oomph.errors import BadInput, CannotRehearse, OomphError, UnknownName
from oomph.gpus import GPU
from oomph.host.link import InstantLink, Link
from oomph.host.slots import SlotStore
from oomph.job import (
    Job,
    batch_size,
    build_model,
    check_optimizer,
    make_batch,
    make_optimizer,
    split_batch,
)
from oomph.planning.choices import Choices
from oomph.rehearsal.compiled import stand_in_for_compiled
from oomph.rehearsal.copies_to_undo import CopiesToUndo
from oomph.rehearsal.copying import HostCopyMode
from oomph.rehearsal.garbage import only_new_garbage
from oomph.rehearsal.graph import RehearsedCapture
from oomph.rehearsal.link import LinkRates, RehearsedLink
from oomph.rehearsal.observing import mark_gradients, mark_model, mark_optimizer_state
from oomph.rehearsal.passing_errors import PassingErrors
from oomph.rehearsal.recorder import Recorder
from oomph.rehearsal.replaying import LATER_STEPS
from oomph.rehearsal.slots import RehearsedSlots
from oomph.rehearsal.storages import tensors_in
from oomph.rehearsal.timeline import END_OF_STEP, Category, Timeline
from oomph.rehearsal.world import pretend
from oomph.running.applying import apply_choices
from oomph.running.evaluating import evaluate_batch
from oomph.running.step import Stage, train_step
from oomph.techniques.attention_rows import gaps_left
from oomph.techniques.autocast import make_scaler, remember_tf32
from oomph.techniques.partial_steps import part_of_a_step
from oomph.timing.clock import Clock

#: In the order they are rehearsed. The second step counts: optimizer state exists from then on.
#: Those after it allocate the same; what they find in the allocator's cache is another matter.
PHASES = ("build", "first step", "step", LATER_STEPS, "eval", "save")

#: Given model, optimizer and recorder before the first phase that runs them.
Watch = Callable[[nn.Module, torch.optim.Optimizer | None, Recorder], None]


@only_new_garbage()
def rehearse(
    job: Job,
    gpu: GPU | None,
    phases: Sequence[str] = PHASES,
    *,
    choices: Choices | None = None,
    watch: Watch | None = None,
    clock: Clock | None = None,
    skip_first_step: bool = False,
    wait_for_copies: bool = True,
) -> Timeline:
    """Every allocation and free of the job's phases on `gpu`; None rehearses the CPU itself.

    With `choices` they are applied to the job first. With `skip_first_step` the optimizer makes its
    state without one, which is quicker and leaves the later steps' peak as it is. Without
    `wait_for_copies` the clock runs as if the link to the host were infinitely fast.
    """
    for phase in phases:
        if phase not in PHASES:
            raise UnknownName("phase", phase, PHASES, f"phases are {', '.join(PHASES)}")
    if gpu is not None and not gpu.has_bf16 and job.precision == "bf16-mixed":
        raise BadInput(f"{gpu.name} knows no bf16: use fp16-mixed")
    job = _with_batch_on_host(job)
    # Shuffling is done for real, so that a batch is known; the user's random stream stays put.
    # What steps here is no step of the user's.
    with (
        torch.random.fork_rng(devices=[]),
        part_of_a_step(),
        _own_settings(),
        pretend(gpu) as recorder,
    ):
        try:
            recorder.clock = clock
            recorder.waits_for_copies = wait_for_copies
            _rehearse(job, recorder, gpu, set(phases), choices, watch, skip_first_step)
        except OomphError:
            raise
        except Exception as error:
            where = recorder.failed_in or recorder.current_module or "the model"
            raise CannotRehearse(
                f"the step failed in {where}: {type(error).__name__}: {error}"
            ) from error
    recorder.timeline.notes += recorder.values.notes()
    return recorder.timeline


@contextlib.contextmanager
def _own_settings() -> Iterator[None]:
    """Choices that are applied here may set what all of the process shares; it is put back."""
    put_back = remember_tf32()
    try:
        with gaps_left():
            yield
    finally:
        put_back()


def _rehearse(
    job: Job,
    recorder: Recorder,
    gpu: GPU | None,
    phases: set[str],
    choices: Choices | None,
    watch: Watch | None,
    skip_first_step: bool,
) -> None:
    device = "cuda" if gpu is not None else "cpu"
    with recorder.phase("build"):
        actors = fake_actors(job if choices is None else replace(job, checkpointing="none"))
        recorder.adopt([*actors.model.parameters(), *actors.model.buffers()])
        # Where the host helps, weights come to the GPU one by one, each as it will be there.
        is_placed_later = choices is not None and choices.optimizer_on == "host"
        model = actors.model if is_placed_later else actors.model.to(device)
        _follow_modules(model, recorder)
        mark_model(model, recorder)
        if job.optimizer is not None and not any(p.requires_grad for p in model.parameters()):
            raise BadInput("no parameter of the model needs a gradient: there is nothing to train")
        optimizer = actors.make_optimizer(model)
        if optimizer is not None and not is_placed_later:
            _move_state(optimizer, recorder, device)
        batch = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, actors.batch)
        recorder.categorise(list(tensors_in(batch)), Category.INPUT)
        _mark_gradients(model, recorder)
        stage = _set_stage(job, model, optimizer, gpu, choices, recorder)
        mark_model(model, recorder)  # its weights may be others now
    if watch is not None:
        watch(model, optimizer, recorder)
    if optimizer is not None:
        copies = None
        if stage.in_backward is not None and gpu is not None:
            copies = CopiesToUndo(recorder, optimizer, LinkRates.of(gpu).out)
            stage.in_backward.before_step = copies.wait
        for phase in ("first step", "step"):
            if not phases & {phase, "step", LATER_STEPS, "save"}:
                continue
            with recorder.phase(phase):
                skips = phase == "first step" and skip_first_step
                if skips:
                    _make_state(optimizer, stage)
                    recorder.mark(END_OF_STEP)
                again = phase == "step" and _reaches_into_next(stage, skip_first_step)
                for _ in range(2 if again else 0 if skips else 1):
                    forward = recorder.forward
                    train_step(
                        stage,
                        batch,
                        around_forward=copies.begun_in(forward) if copies else forward,
                        choose_parts=_first_two if skip_first_step else _first_of_each_size,
                    )
                    recorder.mark(END_OF_STEP)
                mark_optimizer_state(optimizer, recorder)
        if LATER_STEPS in phases:
            with recorder.phase(LATER_STEPS):
                pass  # a replay repeats the last step
    if "eval" in phases:
        with recorder.phase("eval"):
            size = stage.job.micro_batch
            for part in _first_of_each_size(split_batch(batch, size) if size else [batch]):
                evaluate_batch(stage, part)
    if "save" in phases:
        with recorder.phase("save"):
            _save(stage)


def _reaches_into_next(stage: Stage, is_first: bool) -> bool:
    """Whether it takes two steps of a kind, of which the second has it all: its end is the next's.

    What the host's cores begin reaches into the next one, which the first of all does not show.
    """
    host = stage.host
    return host is not None and (host.defers or (is_first and host.steps_on_host))


def _set_stage(
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    gpu: GPU | None,
    choices: Choices | None,
    recorder: Recorder,
) -> Stage:
    device = "cuda" if gpu is not None else "cpu"
    if choices is None or optimizer is None:
        return Stage(
            job=job,
            model=model,
            optimizer=optimizer,
            device_type=device,
            scaler=make_scaler(job.precision, device),
        )

    def open_slots(link: Link, largest: int, buffers: int) -> SlotStore:
        assert isinstance(link, RehearsedLink) and gpu is not None
        return RehearsedSlots(recorder, link, gpu, largest=largest, buffers=buffers)

    stage, _ = apply_choices(
        choices,
        job,
        model,
        optimizer,
        device_type=device,
        compile_with=functools.partial(stand_in_for_compiled, recorder=recorder),
        capture_with=RehearsedCapture(recorder),
        slots_with=open_slots,
        link_with=lambda _: RehearsedLink(recorder, gpu) if gpu is not None else InstantLink(),
    )
    stage.weigher = None  # how many targets a batch has is nothing that fake tensors know
    return stage


def _make_state(optimizer: torch.optim.Optimizer, stage: Stage) -> None:
    """Have the optimizer make its state, as its first step would."""
    if stage.host is not None:
        stage.host.make_state()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    if stage.graph is not None:
        stage.graph.finish()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@dataclass(frozen=True, kw_only=True)
class Actors:
    """The job's model, batch and optimizer as fake tensors on the host."""

    model: nn.Module
    batch: Any
    optimizer: torch.optim.Optimizer | None
    job: Job

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        optimizer = self.optimizer
        if optimizer is None:
            make = self.job.optimizer
            if isinstance(make, str):
                make = make_optimizer(make)
            assert not isinstance(make, torch.optim.Optimizer)
            optimizer = make([p for p in model.parameters() if p.requires_grad]) if make else None
        if optimizer is not None:
            check_optimizer(type(optimizer))
        return optimizer


def fake_actors(job: Job) -> Actors:
    """The job's model, batch and optimizer, faked."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    assert isinstance(mode, FakeTensorMode)
    optimizer = job.optimizer if isinstance(job.optimizer, torch.optim.Optimizer) else None
    if isinstance(job.model, nn.Module):
        for module in job.model.modules():
            if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
                _refuse_lazy(module)
        # Copied together: the optimizer must keep pointing at the model's own parameters.
        with HostCopyMode(mode):
            model, optimizer = copy.deepcopy((job.model, optimizer))
        fake_job = Job(**{**vars(job), "model": model})
        model = build_model(fake_job)
    else:
        with mock.patch.object(LazyModuleMixin, "__init__", _refuse_lazy):
            model = build_model(job)
    return Actors(model=model, batch=_fake_batch(job), optimizer=optimizer, job=job)


def _move_state(optimizer: torch.optim.Optimizer, recorder: Recorder, device: str) -> None:
    """State that a given optimizer has already goes where its weights are, but for its counters."""
    for state in optimizer.state.values():
        recorder.adopt(list(tensors_in(state)))
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                state[name] = value.to(device)
    mark_optimizer_state(optimizer, recorder)


def _refuse_lazy(module: nn.Module, *_: Any, **__: Any) -> NoReturn:
    raise CannotRehearse(
        f"{type(module).__name__} takes its sizes from the first batch it sees: run one batch "
        "through the model, then give the job that model instead of a function"
    )


def _with_batch_on_host(job: Job) -> Job:
    """A batch that is on a card already comes from the host in a rehearsal, as all others do."""
    if callable(job.batch):
        return job
    return replace(
        job, batch=tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, make_batch(job))
    )


def _fake_batch(job: Job) -> Any:
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, make_batch(job))


def _follow_modules(model: nn.Module, recorder: Recorder) -> None:
    """Tell the recorder which module runs, so that every block of memory has an address."""
    errors = PassingErrors()

    def enter(path: str, *_: Any) -> None:
        errors.enter()
        recorder.enter_module(path)

    def leave(*_: Any) -> None:
        if errors.leave():  # innermost module first
            recorder.failed_in = recorder.failed_in or recorder.current_module
        recorder.leave_module()

    for path, module in model.named_modules():
        if path:
            module.register_forward_pre_hook(functools.partial(enter, path))
            module.register_forward_hook(leave, always_call=True)


def _mark_gradients(model: nn.Module, recorder: Recorder) -> None:
    def mark(parameter: Tensor) -> None:
        mark_gradients([parameter], recorder)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(mark)


def _first_two(parts: list[Any]) -> list[Any]:
    """Enough for a quick look: one that makes the gradients, one that adds to them."""
    return parts[:2]


def _first_of_each_size(parts: list[Any]) -> list[Any]:
    """Enough micro-batches to stand for all: those of one size repeat the same events.

    The first makes the gradients, the second adds to them, the third finds the allocator's cache as
    the second left it; what follows is the third again.
    """
    last = parts[-1] if batch_size(parts[-1]) != batch_size(parts[0]) else None
    return parts[:3] + ([last] if last is not None and len(parts) > 3 else [])


def _save(stage: Stage) -> None:
    """Every tensor of model and optimizer goes to the host, one after the other."""
    for tensor in tensors_in(stage.model_state()):
        tensor.detach().cpu()
    if stage.optimizer is not None:
        for tensor in tensors_in(stage.optimizer_state()["state"]):
            tensor.cpu()
