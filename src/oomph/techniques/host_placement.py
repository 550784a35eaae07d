"""Where each part of an optimizer on the host is kept: its settings, and what follows from them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from oomph.errors import BadInput
from oomph.memory.numbered_store import OpenStore
from oomph.techniques.disk_gradients import DiskGradients, open_disk_gradients
from oomph.techniques.disk_state import DiskState, choose_for_disk, open_disk_state
from oomph.techniques.low_bit_state import has_low_bit_state
from oomph.techniques.optimizer_steps import Masters, check_per_parameter, sparse_gradient
from oomph.techniques.optimizer_twin import OptimizerTwin, State, frozen_groups, is_elementwise
from oomph.techniques.step_buckets import Trained
from oomph.techniques.streamed_weights import StreamedWeights
from oomph.torch_compat.dispatch import is_traceable_wrapper_subclass

#: State of parameters with at most this share of all elements stays on the GPU. Most parameters are
#: biases and norms, and copying such small tensors costs the host more than the memory is worth.
LITTLE = 1e-4


@dataclass(frozen=True, kw_only=True)
class HostPlacement:
    """Where each part of the optimizer's data is kept."""

    host_share: float = 0.0
    """The share of all elements that the host's cores step: those that forward needs last."""
    disk_share: float = 0.0
    """The share of all elements whose state and masters are on the disk; the GPU steps them."""
    gpu_share: float = 0.0
    """The share of all elements whose state and masters stay on the GPU: the optimizer's first
    parameters, in addition to the smallest ones."""
    keep_gradients: int | None = None
    """Bytes of gradients that may stay on the GPU, those that forward needs first; None is all."""
    gradients_to_disk: bool = False
    """Whether the other gradients go to the disk, except those that the host's cores step."""
    bucket: int = 64 << 20
    """Bytes of weights, or of their masters, that are stepped together."""
    ahead: int = 2
    """Buckets that may be on their way to the GPU at a time, and as many on their way back."""
    early: int = 0
    """Buckets fetched as backward ends, before the norm of all gradients is known, if more than
    `ahead`; as many may be on their way back in the forward that follows."""


def check_placement(
    optimizer: torch.optim.Optimizer, masters: Masters | None, placement: HostPlacement
) -> None:
    """Refuse what cannot be placed so, before anything was moved."""
    check_per_parameter(optimizer, "the optimizer on the host", masters)
    if has_low_bit_state(optimizer):
        raise BadInput("state in 8 bits cannot go to the host: choose one or the other")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise BadInput("a differentiable optimizer cannot go to the host: leave it on the GPU")
    for share in (placement.host_share, placement.disk_share, placement.gpu_share):
        if not 0 <= share <= 1:
            raise BadInput(f"a share is between 0 and 1, not {share}")
    if placement.bucket <= 0 or placement.ahead < 1:
        raise BadInput("buckets have a size, and at least one comes ahead of the one in use")


def check_model(model: nn.Module) -> None:
    """Refuse parameters that cannot be offloaded, before anything was moved or stepped."""
    if sparse := sparse_gradient(model):
        raise BadInput(f"{sparse}: use sparse=False, or leave the optimizer on the GPU")
    for path, parameter in model.named_parameters():
        if is_traceable_wrapper_subclass(parameter) and parameter.requires_grad:
            raise BadInput(
                f"{path} is a {type(parameter.data).__name__}, which is made of other tensors:"
                " leave the optimizer on the GPU"
            )


def find_trained(
    optimizer: torch.optim.Optimizer,
    masters: Masters | None,
    weights: StreamedWeights | None,
) -> list[Trained]:
    """The optimizer's parameters that get gradients, in its order."""
    away: dict[Tensor, Tensor] = {}
    if weights is not None:
        away.update((p, weights.host_weight(p)) for p in weights.parameters)
    found = [
        Trained(
            leaf=leaf,
            owned=owned,
            group=at,
            away=away.get(leaf),
            cuts=weights.cuts(leaf) if weights is not None else (),
        )
        for at, group in enumerate(optimizer.param_groups)
        for owned in group["params"]
        if (leaf := masters.leaf_of(owned) if masters is not None else owned).requires_grad
    ]
    if not found:
        raise BadInput("no parameter of the optimizer is trained: there is nothing to step")
    if len({trained.leaf.device for trained in found}) > 1:
        raise BadInput("the optimizer on the host needs all parameters on one device")
    return found


def choose_staying(trained: Sequence[Trained], share: float) -> set[Trained]:
    """The first parameters, up to this share of all elements, and the tiniest ones.

    The first are mostly those that forward uses first: backward completes them last, when no
    computation is left to overlap with fetching their state. Offloaded weights do not count as
    tiny: all of a block is streamed, or stepped by the host.
    """
    total = sum(one.leaf.numel() for one in trained)
    little = (one for one in trained if one.leaf.numel() <= LITTLE * total)
    staying = {one for one in little if one.away is None}
    left = share * total
    for one in trained:
        left -= one.leaf.numel()
        if left < 0:
            break
        staying.add(one)
    return staying


def place_state_on_disk(
    open_store: OpenStore | None,
    optimizer: torch.optim.Optimizer,
    trained: Sequence[Trained],
    placement: HostPlacement,
) -> DiskState | None:
    """Open the disk space for the state and masters in `disk_share`; None if there are none."""
    chosen = choose_for_disk(trained, placement.disk_share)
    if not chosen:
        return None
    if not is_elementwise(optimizer):
        raise BadInput(
            f"the state of {type(optimizer).__name__} is not in pieces as its parameters are, and "
            "cannot go to the disk: keep it in host memory"
        )
    assert open_store is not None, "there is no disk to put state on"
    made = made_states(optimizer)
    return open_disk_state(
        open_store,
        chosen,
        lambda one: made(one.group, one.owned.dtype),
        bucket=placement.bucket,
        ahead=placement.ahead,
    )


def place_gradients_on_disk(
    open_store: OpenStore | None, trained: Sequence[Trained], placement: HostPlacement
) -> DiskGradients | None:
    """Open the disk space for offloaded gradients; None if there are none."""
    if not placement.gradients_to_disk or placement.keep_gradients is None:
        return None
    assert open_store is not None, "there is no disk to put gradients on"
    return open_disk_gradients(open_store, trained, bucket=placement.bucket, ahead=placement.ahead)


def made_states(optimizer: torch.optim.Optimizer) -> Callable[[int, torch.dtype], State]:
    """A function from group and dtype to the state a first step makes, tried on a tiny tensor."""
    twin = OptimizerTwin(optimizer, on_host=True)
    groups = frozen_groups(optimizer, on_host=True)

    @functools.cache
    def made(group: int, dtype: torch.dtype) -> State:
        tensor = torch.zeros(2, dtype=dtype, device="cpu")
        tensor.grad = torch.zeros(2, dtype=dtype, device="cpu")
        (state,) = twin.step(groups[group], [tensor], [{}])
        return state

    return made
