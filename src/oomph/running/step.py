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

from oomph.job import AUTOCAST, Job, batch_size, compute_loss, split_batch
from oomph.running.optimizer_pieces import OptimizerPieces
from oomph.techniques.autocast import autocast
from oomph.techniques.cuda_graph import GraphedParts, PartOfStep
from oomph.techniques.host_optimizer import HostOptimizer
from oomph.techniques.master_weights import MasterWeights
from oomph.techniques.micro_batch import Weigher, check_parts
from oomph.techniques.optimizer_in_backward import OptimizerInBackward

Around = Callable[[], AbstractContextManager[Any]]


@dataclass(kw_only=True)
class Stage:
    """What a step runs on: the job's model and optimizer, with whatever was applied to them."""

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
    """The optimizer, where its state waits on the host."""
    masters: MasterWeights | None = None
    pieces: OptimizerPieces | None = None
    """Steps the optimizer so that running out of memory leaves no half of a step."""
    weigher: Weigher | None = None
    """How parts of a batch are weighed where their samples do not count alike."""
    returns_loss: bool = False
    """Whether a step returns its loss, which takes a little memory to the end of it."""

    def settle(self) -> None:
        """Complete what goes on in the background: weights and state may be read then."""
        if self.host is not None:
            self.host.settle()

    def model_state(self) -> dict[str, Any]:
        """The model's state dict; its tensors are those in use, or stand for them."""
        with self._left_on_disk():
            return dict(self.model.state_dict(keep_vars=True))

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state dict; its tensors are those in use, or stand for them."""
        assert self.optimizer is not None, "a job without an optimizer is only evaluated"
        with self._left_on_disk():
            return self.optimizer.state_dict()

    def _left_on_disk(self) -> AbstractContextManager[None]:
        return self.host.state_left_on_disk() if self.host is not None else contextlib.nullcontext()

    check: Callable[[Tensor | None], None] | None = None
    """Given the loss when all gradients are there, before the optimizer steps; may raise."""


def train_step(
    stage: Stage,
    batch: Any,
    *,
    around_forward: Around = contextlib.nullcontext,
    choose_parts: Callable[[list[Any]], list[Any]] = list,
) -> Tensor | None:
    """Forward and backward over the batch in micro-batches, then one optimizer step.

    Returns the loss of the whole batch where the stage says so.
    """
    job = stage.job
    whole = split_batch(batch, job.micro_batch) if job.micro_batch else [batch]
    parts = choose_parts(whole)
    weigher = stage.weigher if len(whole) > 1 else None
    if weigher is not None:
        weigher.begin(batch)
    total = batch_size(batch)
    losses: list[Tensor] = []
    with _graph(stage) as graph:
        for part in parts:
            share = batch_size(part) / total if len(parts) > 1 else 1.0
            work = functools.partial(
                _run_part,
                stage,
                batch,
                share,
                weigher,
                around_forward=around_forward,
                last=part is parts[-1],
            )
            if graph is None:
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
    # Before the step: nothing that may fail comes after it.
    whole_loss = _add_up(losses)
    if stage.check is not None:
        stage.check(whole_loss)
    if stage.in_backward is None:
        _step(stage)
    return whole_loss


def _add_up(losses: list[Tensor]) -> Tensor | None:
    if len(losses) > 1:
        return torch.stack(losses).sum()
    return losses[0] if losses else None


@contextlib.contextmanager
def _graph(stage: Stage) -> Iterator[GraphedParts | None]:
    """What runs the parts of a batch as a CUDA graph, where the stage has one."""
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
    """Forward and backward of a part; gives what it adds to the loss."""
    with around_forward(), _autocast(stage):
        loss = _part_loss(stage, part, share, weigher)
    if weigher is not None and not weigher.trusted:
        refuse_uneven_parts(stage, batch)
        weigher.trusted = True
    with _arming(stage, last=last):
        (stage.scaler.scale(loss) if stage.scaler is not None else loss).backward()
    return loss.detach()


def _look(stage: Stage, part: Any) -> None:
    """A forward without gradients that leaves everything as it is."""
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


def refuse_uneven_parts(stage: Stage, batch: Any) -> None:
    """Complain of a loss whose parts do not add up; see `check_parts`."""

    def compute(part: Any) -> Tensor:
        with _autocast(stage):
            return compute_loss(stage.job, stage.model, part)

    weights = {parameter.dtype for parameter in stage.model.parameters()}
    half = stage.job.precision in AUTOCAST or weights & set(AUTOCAST.values())
    check_parts(stage.model, batch, compute, tolerance=1e-2 if half else 1e-4)


def _autocast(stage: Stage) -> AbstractContextManager[Any]:
    return autocast(stage.job.precision, stage.device_type, cast_cache=stage.cast_cache)


def _arming(stage: Stage, *, last: bool) -> AbstractContextManager[Any]:
    if stage.host is not None:
        return stage.host.backward(last=last)
    if stage.in_backward is None or not last:
        return contextlib.nullcontext()
    return stage.in_backward.armed()


def _step(stage: Stage) -> None:
    """Clip where the job says so, then step, then forget the gradients."""
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
    # No `zero_grad`, which runs ops of its own: a step that is made must not fail any more.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
