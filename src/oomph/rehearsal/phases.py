"""The phases in which users run out of memory, rehearsed one after the other."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._pytree import tree_map

from oomph.errors import BadInput, CannotRehearse, OomphError, UnknownName
from oomph.gpus import GPU
from oomph.job import Job, build_model, make_batch, make_optimizer
from oomph.rehearsal.recorder import Recorder
from oomph.rehearsal.timeline import Category, Timeline
from oomph.rehearsal.world import pretend
from oomph.running.step import evaluate, make_scaler, train_step

#: In the order they are rehearsed. The second step counts: optimizer state exists from then on.
PHASES = ("build", "first step", "step", "eval", "save")


def rehearse(job: Job, gpu: GPU | None, phases: Sequence[str] = PHASES) -> Timeline:
    """Every allocation and free of the job's phases on `gpu`; None rehearses the CPU itself."""
    for phase in phases:
        if phase not in PHASES:
            raise UnknownName("phase", phase, PHASES, f"phases are {', '.join(PHASES)}")
    with pretend(gpu) as recorder:
        try:
            _rehearse(job, recorder, gpu, set(phases))
        except OomphError:
            raise
        except Exception as error:
            where = recorder.current_module or type(job.model).__name__
            raise CannotRehearse(
                f"the step failed in {where}: {type(error).__name__}: {error}"
            ) from error
    recorder.timeline.notes += recorder.values.notes()
    return recorder.timeline


def _rehearse(job: Job, recorder: Recorder, gpu: GPU | None, phases: set[str]) -> None:
    device = "cuda" if gpu is not None else "cpu"
    with recorder.phase("build"):
        actors = _fake_actors(job)
        model = actors.model.to(device)
        _follow_modules(model, recorder)
        recorder.categorise(list(model.parameters()), Category.PARAMETER)
        recorder.categorise(list(model.buffers()), Category.BUFFER)
        optimizer = actors.make_optimizer(model)
        batch = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, actors.batch)
        recorder.categorise(list(_tensors(batch)), Category.INPUT)
    steps = [phase for phase in ("first step", "step") if phases & {phase, "step", "save"}]
    if optimizer is not None:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise BadInput("no parameter of the model needs a gradient: there is nothing to train")
        scaler = make_scaler(job, device)
        _mark_gradients(model, recorder)
        for phase in steps:
            with recorder.phase(phase):
                train_step(
                    job,
                    model,
                    optimizer,
                    batch,
                    device_type=device,
                    scaler=scaler,
                    around_forward=recorder.forward,
                )
                for state in optimizer.state.values():
                    recorder.categorise(list(_tensors(state)), Category.OPTIMIZER)
    if "eval" in phases:
        with recorder.phase("eval"):
            evaluate(job, model, batch, device_type=device)
    if "save" in phases:
        with recorder.phase("save"):
            _save(model, optimizer)


@dataclass(frozen=True, kw_only=True)
class _Actors:
    """The job's model, batch and optimizer as fake tensors on the host."""

    model: nn.Module
    batch: Any
    optimizer: torch.optim.Optimizer | None
    job: Job

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        if self.optimizer is not None:
            return self.optimizer
        make = self.job.optimizer
        if isinstance(make, str):
            make = make_optimizer(make)
        assert not isinstance(make, torch.optim.Optimizer)
        return make([p for p in model.parameters() if p.requires_grad]) if make else None


def _fake_actors(job: Job) -> _Actors:
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    assert isinstance(mode, FakeTensorMode)
    optimizer = job.optimizer if isinstance(job.optimizer, torch.optim.Optimizer) else None
    if isinstance(job.model, nn.Module):
        # Copied together: the optimizer must keep pointing at the model's own parameters.
        with FakeCopyMode(mode):
            model, optimizer = copy.deepcopy((job.model, optimizer))
        fake_job = Job(**{**vars(job), "model": model})
        model = build_model(fake_job)
    else:
        model = build_model(job)
    return _Actors(model=model, batch=_fake_batch(job, mode), optimizer=optimizer, job=job)


def _fake_batch(job: Job, mode: FakeTensorMode) -> Any:
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, make_batch(job))


def _follow_modules(model: nn.Module, recorder: Recorder) -> None:
    """Tell the recorder which module runs, so that every block of memory has an address."""
    for path, module in model.named_modules():
        if not path:
            continue
        module.register_forward_pre_hook(lambda *_, path=path: recorder.enter_module(path))
        module.register_forward_hook(lambda *_: recorder.leave_module(), always_call=True)


def _mark_gradients(model: nn.Module, recorder: Recorder) -> None:
    def mark(parameter: Tensor) -> None:
        if parameter.grad is not None:
            recorder.categorise([parameter.grad], Category.GRADIENT)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(mark)


def _save(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Every tensor of model and optimizer goes to the host, one after the other."""
    for tensor in _tensors(model.state_dict()):
        tensor.cpu()
    if optimizer is not None:
        for tensor in _tensors(optimizer.state_dict()["state"]):
            tensor.cpu()


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _tensors(item)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)
