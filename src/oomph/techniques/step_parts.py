"""What an optimizer step with host-resident state needs, on the host's cores or on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from oomph.memory.link import Link
from oomph.techniques.host_state import HostState
from oomph.techniques.step_buckets import Trained
from oomph.techniques.streamed_weights import StreamedWeights


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """The optimizer, and the places of the state and weights that it steps."""

    link: Link
    optimizer: torch.optim.Optimizer
    state: HostState
    masters: Mapping[Trained, Tensor]
    """The masters that are kept in host memory."""
    weights: StreamedWeights | None
    """The weights that are offloaded to the host or to disk."""
    rounded: Callable[[Tensor], None]
    """Called with each owned tensor whose master was stepped."""

    @property
    def away_weights(self) -> StreamedWeights:
        """`weights`, where some are known to be offloaded."""
        assert self.weights is not None
        return self.weights
