"""Autograd's position in a backward pass, and the tensors it saved."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from oomph.torch_compat.private_name import PrivateName

NAMES = (
    PrivateName(
        "torch._C._current_autograd_node",
        used_for="whether an op belongs to a backward, and to which node",
        without_it="memory of backward is put down to forward",
    ),
    PrivateName(
        "torch.autograd.graph.Node._sequence_nr",
        used_for="which module's forward made the node that runs",
        without_it="memory of backward is put down to no module",
    ),
    PrivateName(
        "torch._C._autograd._get_sequence_nr",
        used_for="the number of the next node, as a module is entered and left",
        without_it="memory of backward is put down to no module",
    ),
    PrivateName(
        "torch._C._current_graph_task_id",
        used_for="tells backwards apart, and whether one runs",
        without_it="streamed weights are freed too early, or never",
    ),
    PrivateName(
        "torch._C._autograd._get_current_graph_task_keep_graph",
        used_for="whether somebody goes through the graph again",
        without_it="`retain_graph=True` reads what was overwritten",
    ),
    PrivateName(
        "torch.autograd.Variable._execution_engine",
        used_for="calls back at the end of a backward (`queue_callback`)",
        without_it="streamed weights stay on the card after backward",
    ),
    PrivateName(
        "torch._C._autograd._top_saved_tensors_default_hooks",
        used_for="hands what is saved on to the hooks of others",
        without_it="hooks of the user's on saved tensors are not called",
    ),
    PrivateName(
        "torch._C._autograd._saved_tensors_hooks_is_enabled",
        used_for="whether a transform of `torch.func` forbids such hooks",
        without_it="models that use `torch.func` fail with weights on the host",
    ),
    PrivateName(
        "torch.autograd.graph.Node._raw_saved",
        used_for="finds what a graph keeps alive",
        without_it="`oomph run` does not say which activations were alive",
    ),
    PrivateName(
        "torch.autograd.graph._engine_run_backward",
        used_for="finds the user's line that called backward",
        without_it="reports of out of memory name a line of PyTorch",
    ),
)

current_node = torch._C._current_autograd_node
sequence_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
queue_callback: Callable[..., None] = torch.autograd.Variable._execution_engine.queue_callback
top_saved_tensors_hooks: Callable[..., Any] = torch._C._autograd._top_saved_tensors_default_hooks
hooks_are_allowed: Callable[[], Any] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]

#: The prefix of node attributes that hold saved tensors, not unpacked.
SAVED = "_raw_saved"
#: The function that every backward calls.
RUN_BACKWARD = "_engine_run_backward"
