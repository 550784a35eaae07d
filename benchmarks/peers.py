"""What a user would do to a model without oomph: one row of the frontier each.

A peer changes the model in place, in the way its authors document, and trains it on micro-batches
with the loss that transformers computes.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn

from benchmarks.real_steps import Training
from oomph.jobs.blocks import repeated_blocks
from oomph.jobs.job import AUTOCAST, batch_size, split_batch

Change = Callable[[nn.Module], None]


def checkpoint(model: nn.Module) -> None:
    """Transformers' gradient checkpointing."""
    enable: Callable[..., None] = model.gradient_checkpointing_enable  # type: ignore[assignment]
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def compile_whole(model: nn.Module) -> None:
    """One graph for model and loss."""
    model.compile()


def halve_activations(model: nn.Module) -> None:
    """Have the compiler recompute half of what it would save; goes before compiling."""
    torch._functorch.config.activation_memory_budget = 0.5


def compile_layers(model: nn.Module) -> None:
    """Each repeated layer by itself; checkpointing, where it is on, stays around it."""
    for layer in repeated_blocks(model):
        layer.compile()


def use_liger(model: nn.Module) -> None:
    """Liger's kernels for a Llama, its fused loss among them."""
    _liger().apply_liger_kernel_to_llama(model=model)


def use_liger_loss(model: nn.Module) -> None:
    """Liger's fused linear cross entropy and nothing else of it."""
    _liger().apply_liger_kernel_to_llama(rope=False, rms_norm=False, swiglu=False, model=model)


#: Changes that need a package which may not be there.
_FROM_LIGER = (use_liger, use_liger_loss)


def _liger() -> Any:
    return importlib.import_module("liger_kernel.transformers")


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One way to train, and the samples in each of its forwards."""

    what: str
    micro_batch: int
    changes: tuple[Change, ...] = ()

    @property
    def name(self) -> str:
        """As the table calls it."""
        return f"{self.what}, mb{self.micro_batch}"

    @property
    def is_installed(self) -> bool:
        """Whether the packages it needs are there."""
        needs_liger = any(change in _FROM_LIGER for change in self.changes)
        return not needs_liger or importlib.util.find_spec("liger_kernel") is not None

    def make_step(self, training: Training, precision: str) -> Callable[[], Tensor]:
        """Change the model; what is returned trains it for a step and gives the loss."""
        for change in self.changes:
            change(training.model)
        model, optimizer = training.model, training.optimizer
        total = batch_size(training.batch)
        parts = split_batch(training.batch, self.micro_batch)

        def step() -> Tensor:
            losses = []
            for part in parts:
                with torch.autocast(
                    training.device.type, AUTOCAST.get(precision), enabled=precision in AUTOCAST
                ):
                    loss = model(**part).loss * (batch_size(part) / total)
                loss.backward()
                losses.append(loss.detach())
                del loss
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return torch.stack(losses).sum()

        return step


def _at(sizes: Sequence[int], what: str, *changes: Change) -> tuple[Peer, ...]:
    return tuple(Peer(what=what, micro_batch=size, changes=changes) for size in sizes)


#: Batches of 16. The fastest first: where a run ends early, they are the ones to have.
LLAMA_PEERS = (
    *_at((16, 4), "per-layer compile + fused loss", use_liger_loss, compile_layers),
    *_at(
        (16,),
        "per-layer compile + fused loss + checkpointing",
        use_liger_loss,
        checkpoint,
        compile_layers,
    ),
    *_at((16,), "Liger + gradient checkpointing", use_liger, checkpoint),
    *_at((16, 4), "whole-model compile", compile_whole),
    *_at((4,), "per-layer compile", compile_layers),
    *_at((4,), "Liger kernels", use_liger),
    *_at((16, 4), "gradient checkpointing", checkpoint),
    *_at((4, 1), "eager"),
    *_at((16,), "compile, activation_memory_budget=0.5", halve_activations, compile_whole),
    *_at((2,), "per-layer compile + fused loss", use_liger_loss, compile_layers),
    *_at((1,), "gradient checkpointing", checkpoint),
    *_at((16,), "eager"),
)


def generic_peers(batch: int) -> tuple[Peer, ...]:
    """What can be done to any transformers model; the fastest first."""
    whole, quarter, sixteenth = (max(batch // parts, 1) for parts in (1, 4, 16))
    return (
        *_at((whole, quarter), "per-layer compile", compile_layers),
        *_at((whole, quarter), "whole-model compile", compile_whole),
        *_at((whole, quarter), "per-layer compile + checkpointing", checkpoint, compile_layers),
        *_at((whole,), "gradient checkpointing", checkpoint),
        *_at((quarter, sixteenth), "eager"),
    )
