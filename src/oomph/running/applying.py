"""Apply: give a model and its optimizer what a plan chose, and take it back (rule 4)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from oomph.errors import BadInput
from oomph.job import Job
from oomph.planning.choices import KEEP, Choices, saved_ops
from oomph.running.step import Stage
from oomph.techniques.allocator_settings import set_allocator
from oomph.techniques.autocast import make_scaler, use_tf32
from oomph.techniques.chunked_loss import chunk_loss
from oomph.techniques.compiled_blocks import compile_block
from oomph.techniques.fused_optimizer import fuse_optimizer
from oomph.techniques.low_bit_state import low_bit_state
from oomph.techniques.master_weights import MasterWeights
from oomph.techniques.micro_batch import Weigher, why_whole
from oomph.techniques.optimizer_in_backward import OptimizerInBackward
from oomph.techniques.recompute import recompute
from oomph.techniques.technique import Undo

#: Compiles a block whose recompute choice is given; a rehearsal has a stand-in for it.
Compile = Callable[[nn.Module, str], Undo]

_MARK = "_oomph_applied"


def apply_choices(
    choices: Choices,
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    device_type: str,
    compile_with: Compile | None = None,
) -> tuple[Stage, Undo]:
    """Change model and optimizer in place; whatever fails, they are as they were before."""
    refuse_applied(model)
    if choices.micro_batch not in (None, job.micro_batch) and (why := why_whole(model)):
        raise BadInput(f"the batch must not be split: {why}; plan again")
    with contextlib.ExitStack() as undos:
        do = undos.callback
        setattr(model, _MARK, True)
        do(delattr, model, _MARK)
        do(set_allocator(choices.allocator))
        if choices.precision == "tf32":
            do(use_tf32())
        masters = None
        if choices.weights != "own":
            masters = MasterWeights(model, optimizer)
            do(masters.undo)
        if choices.fused_optimizer:
            do(fuse_optimizer(optimizer))
        if choices.low_bit_state:
            do(low_bit_state(optimizer))
        _apply_to_blocks(choices, model, compile_with, do)
        if choices.loss_chunk is not None:
            head = find_module(model, choices.head)
            if not isinstance(head, nn.Linear):
                raise BadInput(f"the plan's head {choices.head} is no linear layer of this model")
            do(chunk_loss(head, choices.loss_chunk))
        scaler = make_scaler(choices.precision, device_type)
        in_backward = None
        if choices.optimizer_in_backward:
            in_backward = OptimizerInBackward(
                optimizer, masters=masters, clip_norm=job.clip_norm, scaler=scaler
            )
            do(in_backward.undo)
        stage = Stage(
            job=dataclasses.replace(
                job,
                precision=choices.precision,  # type: ignore[arg-type]
                micro_batch=choices.micro_batch,
                checkpointing="none",
            ),
            model=model,
            optimizer=optimizer,
            device_type=device_type,
            scaler=scaler,
            cast_cache=choices.cast_cache,
            in_backward=in_backward,
            weigher=Weigher(job.items),
            returns_loss=True,
        )
        return stage, undos.pop_all().close


def refuse_applied(model: nn.Module) -> None:
    """Complain if a plan is applied to this model, or to a part of it."""
    if any(getattr(module, _MARK, False) for module in model.modules()):
        raise BadInput("a plan is applied to this model already; undo it first")


def _apply_to_blocks(
    choices: Choices, model: nn.Module, compile_with: Compile | None, do: Callable[[Undo], Any]
) -> None:
    for path, how in choices.blocks.items():
        block = find_module(model, path)
        if compile_with is not None and choices.compiled:
            do(compile_with(block, how))
            continue
        if how != KEEP:
            do(recompute(block, saved_ops(how), compiled=choices.compiled))
        if choices.compiled:
            do(compile_block(block))
    for path in choices.compiled_others:
        other = find_module(model, path)
        do(compile_with(other, KEEP) if compile_with is not None else compile_block(other))


def find_module(model: nn.Module, path: str) -> nn.Module:
    """The submodule at `path`."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise BadInput(f"the plan names {path}, which {type(model).__name__} has not") from None
