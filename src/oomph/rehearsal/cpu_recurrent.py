"""An LSTM on the CPU: oneDNN runs a layer as one op, and keeps a workspace for its backward.

Only oneDNN knows the workspace's size on this CPU. To find it, the layer runs once for real on
zeros, and the size is cached for its shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oomph.torch_compat.dispatch import disable_current_modes

_Shaped = tuple[tuple[int, ...], torch.dtype]


def run_recurrent_layer(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The outputs of `mkldnn_rnn_layer`, with its workspace as large as on this CPU."""
    *out, workspace = func(*args, **kwargs)
    given = tuple(_shaped(value) for value in args)
    named = tuple((name, _shaped(value)) for name, value in kwargs.items())
    return (*out, workspace.new_empty(_workspace_size(func, given, named)))


def run_recurrent_backward(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Like `mkldnn_rnn_layer_backward`, whose fake op may return one tensor for both biases."""
    out = list(func(*args, **kwargs))
    if out[4] is out[3]:
        out[4] = torch.empty_like(out[3])
    return tuple(out)


def _shaped(value: Any) -> Any:
    """A hashable form of an argument: shape and dtype for a tensor, else the value itself."""
    if isinstance(value, Tensor):
        return _Zeros((tuple(value.shape), value.dtype))
    return tuple(value) if isinstance(value, list) else value


class _Zeros(tuple[Any, ...]):
    """A tensor's shape and dtype; a type of its own tells it from tuples that are arguments."""


@functools.cache
def _workspace_size(func: Any, given: tuple[Any, ...], named: tuple[tuple[str, Any], ...]) -> int:
    def real(value: Any) -> Any:
        return (
            torch.zeros(*value[:1], dtype=value[1], device="cpu")
            if isinstance(value, _Zeros)
            else value
        )

    with disable_current_modes(), torch.enable_grad():
        args = [real(value) for value in given]
        workspace = func(*args, **{name: real(value) for name, value in named})[3]
        return int(workspace.numel())
