"""Ops that process each sample along one dimension independently: mostly layers."""

from __future__ import annotations

import functools
from dataclasses import replace

from oomph.splitting.call import Call, MixesSamples
from oomph.splitting.flow import (
    SAME,
    Flow,
    Kind,
    Order,
    joined,
    rows,
    same_order,
)
from oomph.splitting.rules.elementwise import broadcast, refuse_power
from oomph.splitting.rules.registry import OPS, Rule, enter
from oomph.splitting.rules.views import single
from oomph.splitting.trace import Seen


def trailing(call: Call, count: int) -> Flow:
    """An op over the last `count` dimensions; the dimensions before these are independent."""
    refuse_power(call)
    flows = [(seen, flow) for seen, flow in call.tensors()]
    if any(flow.kind in (Kind.SUM, Kind.POSITION) for _, flow in flows):
        raise MixesSamples(f"{call.base} of a sum over samples")
    carrying = [(seen, flow) for seen, flow in flows if flow.has_samples]
    if not carrying:
        return joined(flow for _, flow in flows)
    if any(flow.dim >= len(seen.shape) - count for seen, flow in carrying):
        raise MixesSamples(f"{call.base} goes over the samples of the batch")
    at, order = carrying[0][1].dim, carrying[0][1].order
    for _, flow in carrying[1:]:
        both = same_order(order, flow.order)
        if flow.dim != at or both is None:
            raise MixesSamples(f"{call.base} combines each sample with others")
        order = both
    return rows(at, order, of=[flow for _, flow in flows])


def _over_trailing(count: int, call: Call) -> Flow:
    return trailing(call, count)


for _count in (1, 2, 3):
    enter(*OPS[f"trailing_{_count}"])(functools.partial(_over_trailing, _count))


@enter("constant_pad_nd", "pad")
def pad(call: Call) -> Flow:
    """Pads the last dimensions with a constant."""
    padding = [int(one) for one in call["pad"]]
    _, flow = single(call)
    touched = max((at // 2 + 1 for at, size in enumerate(padding) if size), default=0)
    if flow.kind is Kind.SUM and call["value"]:
        raise MixesSamples("a sum over samples is padded with a number")
    return trailing(call, touched) if flow.has_samples else flow


@enter("_fft_r2c", "_fft_c2r", "_fft_c2c")
def fourier(call: Call) -> Flow:
    """A Fourier transform of some dimensions."""
    seen, flow = single(call)
    if flow.has_samples and flow.dim in call.dims(seen):
        raise MixesSamples("a Fourier transform goes over the samples of the batch")
    return flow


@enter("native_layer_norm", "_fused_rms_norm", "rms_norm")
def layer_norm(call: Call) -> Flow:
    """Normalises each sample by its own mean and variance, over the last dimensions."""
    seen, flow = call["input"], call.flow("input")
    assert flow is not None
    _only("input")(call)
    refuse_power(call)
    if flow.has_samples and flow.dim >= len(seen.shape) - len(call["normalized_shape"]):
        raise MixesSamples("the norm goes over the samples of the batch")
    return replace(
        joined(f for _, f in call.tensors()), kind=flow.kind, dim=flow.dim, order=flow.order
    )


def _only(*names: str) -> Rule:
    """Samples may lie along one dimension of these arguments; all others must be constant."""

    def check(call: Call) -> Flow:
        carrying = [flow for name in names if (flow := call.flow(name)) and flow.has_samples]
        for _, flow in call.tensors():
            if flow.kind in (Kind.SUM, Kind.POSITION):
                raise MixesSamples(f"{call.base} of a sum over samples")
            if flow.has_samples and not any(flow is one for one in carrying):
                raise MixesSamples(f"{call.base} has weights of its own for each sample")
        if not carrying:
            return joined(flow for _, flow in call.tensors())
        order: Order | None = SAME
        for flow in carrying:
            order = same_order(order, flow.order) if order is not None else None
        if order is None or len({flow.dim for flow in carrying}) > 1:
            raise MixesSamples(f"{call.base} combines each sample with others")
        return rows(carrying[0].dim, order, of=[flow for _, flow in call.tensors()])

    return check


def first_dim(*names: str) -> Rule:
    check = _only(*names)

    def rule(call: Call) -> Flow:
        refuse_power(call)
        flow = check(call)
        if flow.has_samples and flow.dim != 0:
            raise MixesSamples(f"{call.base} goes over the samples of the batch")
        return flow

    return rule


enter(*OPS["convolutions"])(first_dim("input", "self"))
enter("grid_sampler_2d", "grid_sampler_3d")(first_dim("input", "grid"))
enter("affine_grid_generator")(first_dim("theta"))
enter("col2im")(first_dim("self"))


@enter("linear")
def linear(call: Call) -> Flow:
    """Multiplies each row by one matrix."""
    flow = _only("input")(call)
    if flow.has_samples and flow.dim == len(call["input"].shape) - 1:
        raise MixesSamples("linear goes over the samples of the batch")
    refuse_power(call)
    return flow


@enter(*OPS["batch_norms"])
def batch_norm(call: Call) -> Flow:
    """Normalises each channel by statistics over all samples, or by running statistics."""
    trains = bool(call["training"] if call["training"] is not None else call["train"])
    if "no_training" in call.base or "no_update" in call.base:
        trains = False
    name = "input" if isinstance(call["input"], Seen) else "self"
    flow = call.flow(name)
    assert flow is not None
    others = [one for seen, one in call.tensors() if seen is not call[name]]
    if not flow.has_samples:
        if flow.kind is Kind.SUM:
            raise MixesSamples("a sum over samples is normalised")
        return joined(one for _, one in call.tensors())
    alike = all(
        one.kind is Kind.FREE
        or (one.kind is Kind.ROWS and same_order(flow.order, one.order) is not None)
        for one in others
    )
    if flow.dim == 1 and alike:
        return rows(1, flow.order, of=[flow, *others])  # instance norm: channels are samples
    if trains:
        raise MixesSamples(
            "BatchNorm averages over the batch it sees: in parts its outputs and statistics would"
            " be others"
        )
    return first_dim(name)(call)


@enter(*OPS["attentions"])
def attention(call: Call) -> Flow:
    """Each sample attends only to itself."""
    refuse_power(call)
    names = ("query", "key", "value")
    flows = [(call[name], call.flow(name)) for name in names]
    masks = [
        (call[name], flow)
        for name in ("attn_bias", "attn_mask", "bias")
        if (flow := call.flow(name)) is not None
    ]
    width = len(call["query"].shape)
    if any(isinstance(call[name], Seen) for name in ("cu_seqlens_q", "cum_seq_q")):
        raise MixesSamples("attention over packed sequences")
    given = [(seen, flow) for seen, flow in (*flows, *masks) if flow is not None]
    if any(flow.kind not in (Kind.FREE, Kind.ROWS) for _, flow in given):
        raise MixesSamples(f"{call.base} of a sum over samples")
    flow = broadcast(call, given, width)
    if flow.has_samples and flow.dim >= width - 2:
        raise MixesSamples("samples attend to each other")
    return flow


@enter("embedding")
def embedding(call: Call) -> Flow:
    """Looks up a row of a table for each index."""
    table, flow = call.flow("weight"), call.flow("indices")
    assert table is not None and flow is not None
    if not table.is_whole or flow.kind not in (Kind.FREE, Kind.ROWS):
        raise MixesSamples("embedding looks samples up in others")
    return replace(joined([table, flow]), kind=flow.kind, dim=flow.dim, order=flow.order)


@enter("_cudnn_rnn", "mkldnn_rnn_layer", "_cudnn_rnn_flatten_weight")
def recurrent(call: Call) -> Flow:
    """A recurrent layer over whole sequences, time first."""
    sizes = call["batch_sizes"]
    if sizes:
        raise MixesSamples("sequences are packed, so that samples of different lengths lie mixed")
    carrying = [(s, f) for s, f in call.tensors() if f.has_samples]
    if any(flow.kind not in (Kind.FREE, Kind.ROWS) for _, flow in call.tensors()):
        raise MixesSamples(f"{call.base} of a sum over samples")
    if not carrying:
        return joined(flow for _, flow in call.tensors())
    name = "input" if isinstance(call["input"], Seen) else "self"
    flow = call.flow(name)
    if flow is None or not flow.has_samples or flow.dim == len(call[name].shape) - 1:
        raise MixesSamples("a recurrent layer goes over the samples of the batch")
    first = 0 if call["batch_first"] and call.base == "_cudnn_rnn" else 1
    if flow.dim != first or any(len(s.shape) == 3 and f.dim not in (first, 1) for s, f in carrying):
        raise MixesSamples("a recurrent layer takes the samples for a sequence")
    if any(same_order(flow.order, one.order) is None for _, one in carrying):
        raise MixesSamples("a recurrent layer begins with states of others")
    return rows(flow.dim, flow.order, of=[f for _, f in call.tensors()])


@enter("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell")
def recurrent_cell(call: Call) -> Flow:
    """One step of a recurrent layer."""
    return trailing(call, 1)
