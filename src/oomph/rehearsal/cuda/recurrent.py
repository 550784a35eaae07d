"""cuDNN's recurrent layers: one op for a whole stack, with weights in one buffer.

The size of what cuDNN keeps for backward (the reserve) follows from the values that each layer
saves per step; the formula gave the exact bytes of an LSTM and a GRU on an H200. The workspace is
known only roughly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

#: cuDNN's numbers for the kinds of layer.
MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
#: Values per hidden unit and step that a layer saves: its gates and states. Plain layers were never
#: measured; the op is not among the checked ones, which widens the interval.
_REMEMBERED = {0: 2, 1: 2, 2: 5, 3: 6}
_PAGE = 256


def run_recurrent(
    mode: str,
    input: Tensor,
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    batch_sizes: Sequence[int] = (),
) -> tuple[Tensor, ...]:
    """What `torch.lstm` and its kin call on a GPU; returns the output and the last states.

    Packed sequences come as one row per step, with `batch_sizes` giving the count at each time.
    """
    hidden = states[0].shape[-1]
    per_layer = 4 if has_biases else 2
    cell = states[1] if mode == "lstm" else None
    output, last, last_cell, *_ = aten._cudnn_rnn(
        input,
        list(params),
        per_layer,
        None,
        states[0],
        cell,
        MODES[mode],
        hidden,
        0,
        layers,
        batch_first,
        dropout,
        train,
        bidirectional,
        list(batch_sizes),
        None,
    )
    return (output, last, last_cell) if mode == "lstm" else (output, last)


def cudnn_rnn(
    input: Tensor,
    weights: Sequence[Tensor],
    weight_stride: int,
    weight_buffer: Tensor | None,
    state: Tensor,
    cell: Tensor | None,
    mode: int,
    hidden: int,
    projected: int,
    layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    *_: Any,
) -> tuple[Tensor, ...]:
    """The outputs of `_cudnn_rnn`: result, last states, reserve and the weights' buffer."""
    directions = 2 if bidirectional else 1
    width = (projected or hidden) * directions
    remembered = layers * _REMEMBERED[mode] * directions + (layers - 1) * directions
    rows = input.shape[:-1].numel()
    reserve = rows * remembered * hidden * input.element_size() + _PAGE if train else 0
    # Time comes first in memory, whichever dimension comes first for the user.
    turned = batch_first and not batch_sizes
    output = input.new_empty(*(input.shape[1::-1] if turned else input.shape[:-1]), width)
    return (
        output.transpose(0, 1) if turned else output,
        torch.empty_like(state),
        torch.empty_like(cell) if cell is not None else input.new_empty(0),
        input.new_empty(reserve, dtype=torch.uint8),
        input.new_empty(0) if weight_buffer is None else weight_buffer,
    )


def cudnn_rnn_backward(
    input: Tensor,
    weights: Sequence[Tensor],
    weight_stride: int,
    weight_buffer: Tensor,
    state: Tensor,
    cell: Tensor | None,
    *_: Any,
) -> tuple[Any, ...]:
    """Gradients of input, states and weights; the weights' gradients share one buffer."""
    gradient = input.new_empty(sum(weight.numel() for weight in weights))
    parts = gradient.split([weight.numel() for weight in weights])
    return (
        torch.empty_like(input),
        torch.empty_like(state),
        torch.empty_like(cell) if cell is not None else None,
        [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)],
    )


def rnn_workspace(input: Tensor, weight_bytes: int, hidden: int) -> int:
    """cuDNN's workspace, roughly: the weights once more, and six gates of every step."""
    steps = input.shape[:-1].numel()
    return weight_bytes + steps * (6 * hidden + input.shape[-1]) * input.element_size()


def flatten_weights(weights: Sequence[Tensor], *_: Any) -> Tensor:
    """`_cudnn_rnn_flatten_weight`: the weights become views of one new buffer."""
    buffer = weights[0].new_empty(sum(weight.numel() for weight in weights))
    start = 0
    for weight in weights:
        weight.set_(buffer.untyped_storage(), start, weight.shape, weight.stride())
        start += weight.numel()
    return buffer
