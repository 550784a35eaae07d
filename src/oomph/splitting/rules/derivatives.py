"""Backward ops, in losses that differentiate with respect to their input."""

from __future__ import annotations

from oomph.splitting.call import Call, MixesSamples
from oomph.splitting.flow import (
    Flow,
)
from oomph.splitting.rules.per_sample import first_dim
from oomph.splitting.rules.registry import OPS, enter


@enter("native_layer_norm_backward", "_fused_rms_norm_backward")
def layer_norm_backward(call: Call) -> Flow:
    """The input's gradient; the weights', a sum over samples, should not occur in a loss."""
    flow = first_dim("grad_out", "input", "mean", "rstd")(call)
    if flow.has_samples and len(call["input"].shape) == len(call["normalized_shape"]):
        raise MixesSamples("the norm goes over the samples of the batch")
    return flow


enter("native_group_norm_backward")(first_dim("grad_out", "input", "mean", "rstd"))
enter("convolution_backward")(first_dim("grad_output", "input"))
enter(*OPS["pooling_backward"])(first_dim("grad_output", "self", "indices"))


@enter("select_backward", "slice_backward", "diagonal_backward")
def view_backward(call: Call) -> Flow:
    """The gradient of a view: zeros, except for the viewed entries."""
    flow = call.flow("grad_output")
    assert flow is not None
    if not flow.has_samples:
        return flow
    removed = call.base == "select_backward"
    at = int(call["dim"] or 0) % len(call.out.shape)
    dim = flow.dim + (removed and at <= flow.dim)
    if dim == at or call.base == "diagonal_backward":
        raise MixesSamples("samples are taken out of the batch")
    return flow.moved(dim)
