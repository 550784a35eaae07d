"""What a step from the host works with, whoever makes it: the host's cores or the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from oomph.host.link import Link
from oomph.techniques.host_state import HostState
from oomph.techniques.step_buckets import Trained
from oomph.techniques.streamed_weights import StreamedWeights


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """The optimizer, and where the numbers are that it steps."""

    link: Link
    optimizer: torch.optim.Optimizer
    state: HostState
    masters: Mapping[Trained, Tensor]
    """In host memory, of the parameters that have one there."""
    weights: StreamedWeights | None
    """Those that are on the host or on the disk themselves."""
    rounded: Callable[[Tensor], None]
    """Is told of each parameter whose master was stepped."""

    @property
    def away_weights(self) -> StreamedWeights:
        """The same, where some are known to be there."""
        assert self.weights is not None
        return self.weights
