"""One optimizer step of a job, the way a careful user would write it.

The same code runs on a GPU and is rehearsed on fake tensors (rule 1).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oomph.engine.optimizer_pieces import OptimizerPieces
from oomph.errors import BadInput
from oomph.jobs.job import AUTOCAST, Job, batch_size, compute_loss, split_batch
from oomph.process.interrupts import interrupts
from oomph.techniques.autocast import autocast
from oomph.techniques.cuda_graph import GraphedParts, PartOfStep
from oomph.techniques.gradient_hooks import GradientHooks, hooks_of_step
from oomph.techniques.host_optimizer import HostOptimizer
from oomph.techniques.loss_split import LossSplit
from oomph.techniques.master_weights import MasterWeights
from oomph.techniques.micro_batch import Weigher, why_whole
from oomph.techniques.optimizer_in_backward import OptimizerInBackward
from oomph.techniques.parts_trial import check_parts
from oomph.techniques.recompute import calls_end_with

Around = Callable[[], AbstractContextManager[Any]]


@dataclass(kw_only=True)
class Stage:
    """What a step runs on: the job's model and optimizer, with everything applied to them."""

    job: Job
    """Its precision and micro-batch are those the step uses."""
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    device_type: str = "cuda"
    scaler: torch.amp.GradScaler | None = None
    cast_cache: bool = True
    in_backward: OptimizerInBackward | None = None
    graph: GraphedParts | None = None
    host: HostOptimizer | None = None
    """The optimizer, if its state is offloaded to the host."""
    masters: MasterWeights | None = None
    pieces: OptimizerPieces | None = None
    """Steps the optimizer so that running out of memory never leaves half a step."""
    weigher: Weigher | None = None
    """Weighs the parts of a batch if their samples do not count alike."""
    own_micro_batch: int | None = None
    """The user's own micro-batch size: hooks on gradients are called for each such part."""
    returns_loss: bool = False
    """Whether a step returns its loss, which takes a little memory until it ends."""

    def settle(self) -> None:
        """Complete background work, so that weights and state may be read."""
        if self.host is not None:
            self.host.settle()

    def model_state(self) -> dict[str, Any]:
        """The model's state dict, with the tensors in use or placeholders for them."""
        with self._left_on_disk():
            return dict(self.model.state_dict(keep_vars=True))

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state dict, with the tensors in use or placeholders for them."""
        assert self.optimizer is not None, "a job without an optimizer is only evaluated"
        with self._left_on_disk():
            return self.optimizer.state_dict()

    def _left_on_disk(self) -> AbstractContextManager[None]:
        return self.host.state_left_on_disk() if self.host is not None else contextlib.nullcontext()

    check: Callable[[Tensor | None], None] | None = None
    """Called with the loss once all gradients exist, before the optimizer steps; may raise."""


def train_step(
    stage: Stage,
    batch: Any,
    *,
    around_forward: Around = contextlib.nullcontext,
    choose_parts: Callable[[list[Any]], list[Any]] = list,
) -> Tensor | None:
    """Forward and backward over the batch in micro-batches, then one optimizer step.

    Returns the loss of the whole batch if `stage.returns_loss`.
    """
    if stage.masters is not None:
        stage.masters.check_step()
    whole = _split(stage, batch)
    parts = choose_parts(whole)
    hooks = _gradient_hooks(stage, len(whole))
    weigher = stage.weigher if len(whole) > 1 else None
    if weigher is not None:
        _refuse_new_norms(stage)
        weigher.begin(batch)
    total = _samples(stage, batch)
    losses: list[Tensor] = []
    with calls_end_with(stage.model), _graph(stage) as graph, hooks.withheld():
        for part in parts:
            interrupts.let_through()
            share = _samples(stage, part) / total if len(parts) > 1 else 1.0
            work = functools.partial(
                _run_part,
                stage,
                batch,
                share,
                weigher,
                around_forward=around_forward,
                last=part is parts[-1] and not hooks.are_called_once,
            )
            if graph is None or hooks.are_there:
                loss = work(part)
            else:
                loss = graph.run(
                    PartOfStep(
                        batch=part,
                        share=share,
                        weigher=weigher,
                        work=work,
                        look=functools.partial(_look, stage),
                        weights=[*stage.model.parameters(), *stage.model.buffers()],
                    )
                )
            if stage.returns_loss:
                losses.append(loss)
            del loss
        if weigher is not None:
            weigher.finish()
    if hooks.are_called_once:
        with _arming(stage, last=True):
            hooks.call()
    # Computed before the step: nothing after the step may fail.
    whole_loss = _add_up(losses)
    if stage.check is not None:
        stage.check(whole_loss)
    if stage.host is None or not stage.host.has_stepped:
        interrupts.let_through()
    if stage.in_backward is None:
        _step(stage)
    return whole_loss


def _split(stage: Stage, batch: Any) -> list[Any]:
    size = stage.job.micro_batch
    if not size:
        return [batch]
    if stage.weigher is not None:
        return stage.weigher.parts(batch, size)
    return split_batch(batch, size, stage.job.sample_tensors)


def _samples(stage: Stage, batch: Any) -> int:
    if stage.weigher is not None:
        return stage.weigher.samples(batch)
    return batch_size(batch, stage.job.sample_tensors)


def _refuse_new_norms(stage: Stage) -> None:
    """Refuse a layer that averages over its batch by now, for example one switched to training."""
    if stage.job.micro_batch != stage.own_micro_batch and (why := why_whole(stage.model)):
        raise BadInput(f"the batch must not be split any more: {why}; undo the run and plan again")


def compute_forward(stage: Stage, batch: Any) -> Tensor:
    """The loss of a whole batch, with the graph for its backward."""
    with _autocast(stage):
        return compute_loss(stage.job, stage.model, batch)


def _gradient_hooks(stage: Stage, parts: int) -> GradientHooks:
    """The user's hooks on gradients, as a step of `parts` parts calls them."""
    return hooks_of_step(
        stage.model,
        parts=parts,
        as_the_job=stage.job.micro_batch == stage.own_micro_batch,
        in_parts=stage.own_micro_batch is not None,
        host=stage.host,
        masters=stage.masters,
    )


def _add_up(losses: list[Tensor]) -> Tensor | None:
    if len(losses) > 1:
        return torch.stack(losses).sum()
    return losses[0] if losses else None


@contextlib.contextmanager
def _graph(stage: Stage) -> Iterator[GraphedParts | None]:
    """Runs the parts of a batch as a CUDA graph, if the stage has one."""
    if stage.graph is not None:
        stage.graph.begin()
    try:
        yield stage.graph
    except BaseException:
        if stage.graph is not None:
            stage.graph.forget()
        raise
    if stage.graph is not None:
        stage.graph.finish()


def _run_part(
    stage: Stage,
    batch: Any,
    share: float,
    weigher: Weigher | None,
    part: Any,
    *,
    around_forward: Around,
    last: bool,
) -> Tensor:
    """Run forward and backward of a part; returns what it adds to the loss."""
    with around_forward(), _autocast(stage):
        loss = _part_loss(stage, part, share, weigher)
    if weigher is not None and not weigher.trusted:
        refuse_uneven_parts(stage, batch, weigher.split)
        weigher.trusted = True
    interrupts.let_through()
    with _arming(stage, last=last):
        (stage.scaler.scale(loss) if stage.scaler is not None else loss).backward()
    return loss.detach()


def _look(stage: Stage, part: Any) -> None:
    """Run a forward without gradients or side effects."""
    buffers = [(buffer, buffer.clone()) for buffer in stage.model.buffers()]
    devices = [torch.cuda.current_device()] if stage.device_type == "cuda" else []
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices),
        torch.compiler.set_stance("force_eager"),
        _autocast(stage),
    ):
        compute_loss(stage.job, stage.model, part)
        for buffer, before in buffers:
            buffer.copy_(before)


def _part_loss(stage: Stage, part: Any, share: float, weigher: Weigher | None) -> Tensor:
    """What a part adds to the loss of its batch."""
    compute = functools.partial(compute_loss, stage.job, stage.model, part)
    if weigher is not None:
        return weigher.weigh(part, share, compute)
    return compute() * share if share != 1.0 else compute()


def refuse_uneven_parts(stage: Stage, batch: Any, split: LossSplit | None) -> None:
    """Refuse a loss whose parts do not add up; see `check_parts`."""

    def compute(part: Any) -> Tensor:
        with _autocast(stage):
            return compute_loss(stage.job, stage.model, part)

    weights = {parameter.dtype for parameter in stage.model.parameters()}
    half = stage.job.precision in AUTOCAST or weights & set(AUTOCAST.values())
    check_parts(
        stage.model,
        batch,
        compute,
        tolerance=1e-2 if half else 1e-4,
        weigher=Weigher(split=split),
    )


def _autocast(stage: Stage) -> AbstractContextManager[Any]:
    return autocast(stage.job.precision, stage.device_type, cast_cache=stage.cast_cache)


def _arming(stage: Stage, *, last: bool) -> AbstractContextManager[Any]:
    if stage.host is not None:
        return stage.host.backward(last=last)
    if stage.in_backward is None or not last:
        return contextlib.nullcontext()
    return stage.in_backward.armed()


def _step(stage: Stage) -> None:
    """Clip if the job says so, step, and drop the gradients."""
    if stage.host is not None:
        stage.host.step()
        return
    optimizer, scaler = stage.optimizer, stage.scaler
    assert optimizer is not None, "a job without an optimizer is only evaluated"
    if stage.job.clip_norm is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(owned, stage.job.clip_norm)
    if stage.pieces is not None:
        stage.pieces.step(scaler)
    elif scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    # Not `zero_grad`, which runs ops of its own: after a completed step nothing may fail.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
