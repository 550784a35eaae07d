"""Rehearses the phases in which users run out of memory, one after the other."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from oomph.engine.applying import apply_choices
from oomph.engine.evaluating import evaluate_batch
from oomph.engine.step import Stage, compute_forward, train_step
from oomph.errors import BadInput, CannotRehearse, OomphError, UnknownName
from oomph.hardware import GPU
from oomph.hardware.timing.clock import Clock
from oomph.jobs.job import (
    Job,
    batch_size,
    build_model,
    check_optimizer,
    make_batch,
    make_optimizer,
    refuse_scripted,
    split_batch,
)
from oomph.memory.link import InstantLink, Link
from oomph.memory.numbered_store import NumberedStore
from oomph.plans.choices import Choices
from oomph.process.rehearsal_threads import rehearsing, replaced_here
from oomph.rehearsal.compiled import stand_in_for_compiled
from oomph.rehearsal.copies_to_undo import CopiesToUndo
from oomph.rehearsal.copying import HostCopyMode, copied_generators
from oomph.rehearsal.garbage import only_new_garbage
from oomph.rehearsal.graph import RehearsedCapture
from oomph.rehearsal.link import LinkRates, RehearsedLink
from oomph.rehearsal.observing import mark_gradients, mark_model, mark_optimizer_state
from oomph.rehearsal.passing_errors import PassingErrors
from oomph.rehearsal.recorder import Recorder
from oomph.rehearsal.replaying import LATER_STEPS
from oomph.rehearsal.shared_state import shared_state_kept
from oomph.rehearsal.storages import tensors_in
from oomph.rehearsal.stores import RehearsedStore
from oomph.rehearsal.timeline import END_OF_STEP, Category, Timeline
from oomph.rehearsal.world import pretend
from oomph.techniques.autocast import make_scaler
from oomph.techniques.partial_steps import part_of_a_step
from oomph.techniques.technique import techniques
from oomph.torch_compat.compiler import UNCOMPILED, loaded_compiler
from oomph.torch_compat.dispatch import disable_current_modes
from oomph.torch_compat.fake_tensors import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    current_fake_mode,
)
from oomph.torch_compat.pytree import tree_map

#: Phases in the order they are rehearsed. The second step counts: optimizer state exists from then
#: on. Later steps allocate the same, but find a different allocator cache.
PHASES = ("build", "first step", "step", LATER_STEPS, "eval", "save")

#: Only the forward of a training step, with gradients: for callers that inspect it.
FORWARD = "forward"

#: A buffer with more floats holds statistics or a table: no forward branches on single numbers of
#: it.
MOST_NUMBERS_OF_A_BUFFER = 64

#: Called with model, optimizer and recorder before the first phase that runs them.
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

    `choices` are applied to the job first. With `skip_first_step` the optimizer creates its state
    without a step, which is quicker and does not change the later steps' peak. Without
    `wait_for_copies` the clock runs as if the link to the host were infinitely fast.
    """
    for phase in phases:
        if phase not in (*PHASES, FORWARD):
            raise UnknownName("phase", phase, PHASES, f"phases are {', '.join(PHASES)}")
    if gpu is not None and not gpu.has_bf16 and job.precision == "bf16-mixed":
        raise BadInput(f"{gpu.name} knows no bf16: use fp16-mixed")
    job = _with_batch_on_host(job)
    # Steps taken here are not steps of the user's program.
    with (
        rehearsing(),
        shared_state_kept(job),
        part_of_a_step(),
        _without_techniques(),
        _nothing_compiled(),
        pretend(gpu) as recorder,
    ):
        try:
            recorder.clock = clock
            recorder.waits_for_copies = wait_for_copies
            _rehearse(job, recorder, gpu, set(phases), choices, watch, skip_first_step)
        except OomphError:
            raise
        except DynamicOutputShapeException as error:
            where = recorder.failed_in or recorder.current_module or "the model"
            raise CannotRehearse(
                f"{error.func} in {where} makes a tensor whose size only real data can tell"
            ) from error
        except Exception as error:
            where = recorder.failed_in or recorder.current_module or "the model"
            raise CannotRehearse(
                f"the step failed in {where}: {type(error).__name__}: {error}"
                + _perhaps_because(recorder)
            ) from error
    recorder.timeline.notes += recorder.values.notes()
    return recorder.timeline


@contextlib.contextmanager
def _without_techniques() -> Iterator[None]:
    """While active, what techniques changed in the process for a run is not in the rehearsal."""
    with contextlib.ExitStack() as entered:
        for technique in techniques():
            entered.enter_context(technique.around_rehearsal())
        yield


@contextlib.contextmanager
def _nothing_compiled() -> Iterator[None]:
    """While active, functions that the user compiled run uncompiled.

    The compiler would otherwise trace into the rehearsal itself, fail, and record permanently that
    the function cannot be compiled.
    """
    with contextlib.ExitStack() as stack:
        if (compiler := loaded_compiler()) is not None:
            for name, stand_in in UNCOMPILED.items():
                stack.enter_context(replaced_here(compiler, name, stand_in))
        yield


def _perhaps_because(recorder: Recorder) -> str:
    """If a step failed: names the ops whose outputs were taken to be as large as possible."""
    if not (places := " and ".join(recorder.values.selects_unknown)):
        return ""
    return f"; the size of what is made by {places} is one that only real data can tell"


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
        if isinstance(job.model, nn.Module):
            _know_buffers(job.model, actors.model, recorder)
        # Where the host steps weights, they move to the GPU one by one, each already in its final
        # form.
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
        mark_model(model, recorder)  # weights may have been replaced by now
    if watch is not None:
        watch(model, optimizer, recorder)
    if FORWARD in phases:
        with recorder.phase(FORWARD):
            compute_forward(stage, batch)
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
            _rehearse_eval(stage, batch, recorder, may_fail="step" in phases)
    if "save" in phases:
        with recorder.phase("save"):
            _save(stage)


def _rehearse_eval(stage: Stage, batch: Any, recorder: Recorder, *, may_fail: bool) -> None:
    """Evaluate the batch; after training, a loss that fails without gradients is only noted."""
    size = stage.job.micro_batch
    parts = split_batch(batch, size, stage.job.sample_tensors) if size else [batch]
    try:
        for part in _first_of_each_size(parts):
            evaluate_batch(stage, part)
    except CannotRehearse as error:
        # Detectors, for example, return boxes instead of losses when they are not training.
        if not may_fail:
            raise
        recorder.timeline.notes.append(
            f"the evaluation cannot be rehearsed, and what it needs is not counted: {error}"
        )
    except OomphError:
        raise
    except Exception as error:
        if not may_fail:
            raise
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        recorder.timeline.notes.append(f"the loss cannot be computed without gradients ({reason})")


def _reaches_into_next(stage: Stage, is_first: bool) -> bool:
    """Whether the phase needs two steps, since a step's work ends only within the next step.

    The work that the host's cores begin reaches into the next step; the very first step has no such
    work from a step before, so the second is the first complete one.
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
            own_micro_batch=job.micro_batch,
        )

    def open_store(link: Link, largest: int, buffers: int) -> NumberedStore:
        assert isinstance(link, RehearsedLink) and gpu is not None
        return RehearsedStore(recorder, link, gpu, largest=largest, buffers=buffers)

    stage, _ = apply_choices(
        choices,
        job,
        model,
        optimizer,
        device_type=device,
        compile_with=functools.partial(stand_in_for_compiled, recorder=recorder),
        capture_with=RehearsedCapture(recorder),
        store_with=open_store,
        link_with=lambda _: RehearsedLink(recorder, gpu) if gpu is not None else InstantLink(),
    )
    stage.weigher = None  # fake tensors cannot tell how many targets a batch has
    return stage


def _make_state(optimizer: torch.optim.Optimizer, stage: Stage) -> None:
    """Have the optimizer create its state, as its first step would."""
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
    mode = current_fake_mode()
    assert isinstance(mode, FakeTensorMode)
    optimizer = job.optimizer if isinstance(job.optimizer, torch.optim.Optimizer) else None
    if isinstance(job.model, nn.Module):
        refuse_scripted(job.model)
        for module in job.model.modules():
            if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
                _refuse_lazy(module)
        # Copied together: the optimizer must keep referring to the model's own parameters.
        with HostCopyMode(mode):
            model, optimizer = _copied(job.model, optimizer)
        fake_job = Job(**{**vars(job), "model": model})
        model = build_model(fake_job)
    else:
        with replaced_here(LazyModuleMixin, "__init__", _refuse_lazy):
            made = job.model()
        if isinstance(made, nn.Module):
            refuse_scripted(made)
            made = _own_copy(made, mode)
        model = build_model(Job(**{**vars(job), "model": lambda: made}))
    return Actors(model=model, batch=_fake_batch(job), optimizer=optimizer, job=job)


def _copied(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Copies of both, including attributes that a custom optimizer class adds."""
    memo = copied_generators(model, optimizer)
    model, copied = copy.deepcopy((model, optimizer), memo)
    if optimizer is None or copied is None:
        return model, copied
    # A `step` that a scheduler or the user patched in would step their optimizer, not this copy.
    vars(copied).pop("step", None)
    if type(optimizer).__module__.startswith("torch.optim"):
        return model, copied
    for name, value in vars(optimizer).items():
        if name != "step" and name not in vars(copied):
            with contextlib.suppress(TypeError):  # a lock, an open file: steps work without
                setattr(copied, name, copy.deepcopy(value, memo))
    return model, copied


def _own_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """The model a function returned, or a copy of it if the function did not make all of it."""
    tensors = [*model.parameters(), *model.buffers()]
    made_here = {id(one): one for one in tensors if isinstance(one, FakeTensor)}
    if len(made_here) == len(tensors):
        return model
    with HostCopyMode(mode):
        return copy.deepcopy(model, {**copied_generators(model), **made_here})


def _know_buffers(real: nn.Module, fake: nn.Module, recorder: Recorder) -> None:
    """Track the buffers a forward may branch on: counters, flags and masks, but no statistics."""
    twins = dict(fake.named_buffers(remove_duplicate=False))
    for name, buffer in real.named_buffers(remove_duplicate=False):
        twin = twins.get(name)
        if twin is None or twin.shape != buffer.shape or twin.dtype != buffer.dtype:
            continue
        counts = not (buffer.is_floating_point() or buffer.is_complex())
        if counts or buffer.numel() <= MOST_NUMBERS_OF_A_BUFFER:
            with disable_current_modes():
                numbers = buffer.detach()
            recorder.values.know(twin, numbers)


def _move_state(optimizer: torch.optim.Optimizer, recorder: Recorder, device: str) -> None:
    """Move a given optimizer's existing state to its weights' device, except for its counters."""
    for state in optimizer.state.values():
        recorder.adopt(list(tensors_in(state)))
        for name, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, Tensor) and value.dim():
                state[name] = value.to(device)
    mark_optimizer_state(optimizer, recorder)


def _refuse_lazy(module: nn.Module, *_: Any, **__: Any) -> NoReturn:
    raise CannotRehearse(
        f"{type(module).__name__} takes its sizes from the first batch it sees: run one batch "
        "through the model, then give the job that model instead of a function"
    )


def _with_batch_on_host(job: Job) -> Job:
    """Move a batch that is on a card to the host, where all batches of a rehearsal start."""
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
    """Two micro-batches for a quick check: one creates the gradients, one adds to them."""
    return parts[:2]


def _first_of_each_size(parts: list[Any]) -> list[Any]:
    """Enough micro-batches to stand for all: those of one size repeat the same events.

    The first creates the gradients, the second adds to them, the third finds the allocator's cache
    as the second left it; all later ones repeat the third.
    """
    last = parts[-1] if batch_size(parts[-1]) != batch_size(parts[0]) else None
    return parts[:3] + ([last] if last is not None and len(parts) > 3 else [])


def _save(stage: Stage) -> None:
    """Copy every tensor of model and optimizer to the host, one after the other."""
    for tensor in tensors_in(stage.model_state()):
        tensor.detach().cpu()
    if stage.optimizer is not None:
        for tensor in tensors_in(stage.optimizer_state()["state"]):
            tensor.cpu()
