"""The loss scaler of fp16."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler, _refresh_per_optimizer_state

from oomph.torch_compat.private_name import PrivateName

NAMES = (
    PrivateName(
        "torch.amp.GradScaler._scale",
        used_for="takes a step's scale back, and unscales a gradient at a time",
        without_it="fp16 steps cannot be taken back, nor stepped on the host",
    ),
    PrivateName(
        "torch.amp.GradScaler._growth_tracker",
        used_for="takes a step back, and checks a checkpoint's scaler",
        without_it="fp16 steps cannot be taken back",
    ),
    PrivateName(
        "torch.amp.GradScaler._per_optimizer_states",
        used_for="tells the scaler of an overflow, and takes a step back",
        without_it="fp16 steps that overflow are not skipped by optimizers on the host",
    ),
    PrivateName(
        "torch.amp.grad_scaler._refresh_per_optimizer_state",
        used_for="what the scaler begins a step with",
        without_it="fp16 steps cannot be taken back",
    ),
)

scale_of: Callable[[GradScaler], Tensor | None] = operator.attrgetter("_scale")
growth_of: Callable[[GradScaler], Tensor | None] = operator.attrgetter("_growth_tracker")
states_of: Callable[[GradScaler], dict[int, dict[str, Any]]] = operator.attrgetter(
    "_per_optimizer_states"
)

#: Attribute names, for code that accesses them by name; the second is also a state dict key.
SCALE = "_scale"
GROWTH = "_growth_tracker"


def forget_steps(scaler: GradScaler) -> None:
    """Mark the gradients of all optimizers as not unscaled yet, as after `update`."""
    scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
