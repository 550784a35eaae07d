"""Ops that work along some dimensions, on each line independently."""

from __future__ import annotations

from dataclasses import replace

from oomph.splitting.call import Call, MixesSamples
from oomph.splitting.flow import (
    Flow,
    Kind,
    joined,
)
from oomph.splitting.rules.elementwise import broadcast, refuse_power
from oomph.splitting.rules.per_sample import trailing
from oomph.splitting.rules.registry import OPS, enter
from oomph.splitting.rules.views import single


@enter(*OPS["along"])
def along(call: Call) -> Flow:
    """Each line along a dimension is processed independently."""
    seen, flow = single(call)
    if any(flow.kind is Kind.SUM for _, flow in call.tensors()):
        raise MixesSamples(f"{call.base} of a sum over samples")
    refuse_power(call)
    flow = broadcast(call, list(call.tensors()), len(seen.shape))
    if not flow.has_samples:
        return flow
    if "dim" not in call.step.given and "dims" not in call.step.given:
        raise MixesSamples(f"{call.base} goes over all samples")
    dims = call.dims(seen, "dims" if "dims" in call.step.given else "dim")
    if flow.dim in dims:
        raise MixesSamples(f"{call.base} goes over the samples of the batch")
    return flow


@enter("unfold")
def unfold(call: Call) -> Flow:
    """Windows along a dimension, in a new last dimension."""
    seen, flow = single(call)
    if flow.has_samples and call.dim(seen, "dimension") == flow.dim:
        raise MixesSamples("unfold makes windows of samples")
    return flow


@enter("diagonal")
def diagonal(call: Call) -> Flow:
    """The diagonal of two dimensions, in a new last dimension."""
    seen, flow = single(call)
    if not flow.has_samples:
        return flow
    gone = call.dim(seen, "dim1"), call.dim(seen, "dim2", 1)
    if flow.dim in gone:
        raise MixesSamples("diagonal goes over the samples of the batch")
    return flow.moved(flow.dim - sum(at < flow.dim for at in gone))


@enter("view_as_real", "view_as_complex")
def complex_pairs(call: Call) -> Flow:
    """Complex numbers as pairs of real ones in a new last dimension, or the reverse."""
    seen, flow = single(call)
    if call.base == "view_as_complex" and flow.has_samples and flow.dim == len(seen.shape) - 1:
        raise MixesSamples("samples are taken for parts of complex numbers")
    return flow


@enter("isin")
def isin(call: Call) -> Flow:
    """Whether each number occurs in a set that is the same for all samples."""
    others = call.flow("test_elements")
    flow = call.flow("elements")
    if flow is None or (others is not None and not others.is_whole):
        raise MixesSamples("numbers of a sample are looked for in others")
    if flow.kind not in (Kind.FREE, Kind.ROWS) or flow.power:
        raise MixesSamples("isin of a sum over samples")
    flows = [flow] if others is None else [flow, others]
    return replace(joined(flows), kind=flow.kind, dim=flow.dim, order=flow.order)


@enter("bucketize", "searchsorted")
def bucketize(call: Call) -> Flow:
    """Where each number falls among boundaries that are the same for all samples."""
    name = "boundaries" if call.base == "bucketize" else "sorted_sequence"
    others, flow = call.flow(name), call.flow("self")
    if flow is None or others is None or not others.is_whole or len(call[name].shape) != 1:
        raise MixesSamples("numbers of a sample are looked for in others")
    if flow.kind not in (Kind.FREE, Kind.ROWS) or flow.power:
        raise MixesSamples(f"{call.base} of a sum over samples")
    return replace(joined([flow, others]), kind=flow.kind, dim=flow.dim, order=flow.order)


@enter("tril", "triu")
def triangle(call: Call) -> Flow:
    """The lower or upper triangle of the last two dimensions."""
    return trailing(call, 2)
