"""Ops that select a tensor's entries by other tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from oomph.splitting.call import Call, MixesSamples
from oomph.splitting.flow import (
    ANY,
    FREE,
    SAME,
    Flow,
    Kind,
    Order,
    is_anywhere,
    joined,
    rows,
    same_order,
)
from oomph.splitting.rules.elementwise import broadcast
from oomph.splitting.rules.registry import OPS, enter
from oomph.splitting.trace import Seen


@enter("index", "_unsafe_index")
def index(call: Call) -> Flow:
    """Entries selected by index tensors."""
    seen, flow = call["self"], call.flow("self")
    indices = call["indices"]
    assert flow is not None
    return _indexed(call, seen, flow, indices)


def _indexed(call: Call, seen: Seen, flow: Flow, indices: Sequence[Seen | None]) -> Flow:
    given = [(at, one, call.flow_of(one)) for at, one in enumerate(indices) if one is not None]
    flows = [flow, *(one for _, _, one in given)]
    if any(one.kind in (Kind.SUM, Kind.MIXED) or one.power for one in flows[1:]):
        raise MixesSamples("entries are chosen by a sum over samples")
    if flow.kind is Kind.POSITION:
        raise MixesSamples("places in the batch are chosen from")
    if flow.kind is Kind.SUM:
        if any(one.has_samples for one in flows[1:]):
            raise MixesSamples("each sample takes entries of a sum over all")
        return replace(joined(flows), kind=Kind.SUM, power=flow.power)
    if not any(one.has_samples for one in flows):
        return replace(joined(flows), power=flow.power)
    masks = [(at, one, of) for at, one, of in given if one.dtype is torch.bool]
    if masks:
        return _masked(call, seen, flow, indices, masks)
    dims = [at for at, _, _ in given]
    together = dims == list(range(dims[0], dims[0] + len(dims)))
    front = dims[0] if together else 0
    width = max(len(one.shape) for _, one, _ in given)
    places = [(one, of) for _, one, of in given if of.has_samples]
    if not flow.has_samples:
        return rows(front + _aligned(call, places, width), places[0][1].order, of=flows)
    if flow.dim not in dims:
        if places:
            raise MixesSamples("each sample takes entries of all samples")
        left = flow.dim + width - len(dims) if flow.dim > dims[0] and together else flow.dim
        if not together:
            left = width + sum(1 for at in range(flow.dim) if at not in dims)
        return replace(rows(left, flow.order, of=flows), power=flow.power)
    own = next(of for at, _, of in given if at == flow.dim)
    if own.kind is not Kind.POSITION or flow.order not in (ANY, SAME, ("rows", 1, 1)):
        raise MixesSamples("samples are chosen from the batch, or put in another order")
    at = _aligned(call, places, width)
    return replace(rows(front + at, ("rows", 1, 1), of=flows), power=flow.power)


def _aligned(call: Call, places: Sequence[tuple[Seen, Flow]], width: int) -> int:
    """The dimension of the samples among indices that are broadcast together."""
    at = {flow.dim + width - len(seen.shape) for seen, flow in places}
    order: Order | None = SAME
    for _, flow in places:
        order = same_order(order, flow.order) if order is not None else None
    if len(at) != 1 or order is None:
        raise MixesSamples(f"{call.base} combines each sample with others")
    return at.pop()


def _masked(
    call: Call,
    seen: Seen,
    flow: Flow,
    indices: Sequence[Seen | None],
    masks: Sequence[tuple[int, Seen, Flow]],
) -> Flow:
    """The entries that one mask selects, sample by sample."""
    at, mask, of = masks[0]
    if len([one for one in indices if one is not None]) > 1:
        raise MixesSamples("a mask and other indices choose together")
    flows = [flow, of]
    inside = range(at, at + len(mask.shape))
    if not of.has_samples:
        if not flow.has_samples:
            return replace(joined(flows), power=flow.power)
        if flow.dim in inside:
            raise MixesSamples("a mask chooses samples by their place in the batch")
        moved = flow.dim if flow.dim < at else flow.dim - len(mask.shape) + 1
        return replace(rows(moved, flow.order, of=flows), power=flow.power)
    if flow.has_samples and (flow.dim != at + of.dim or same_order(flow.order, of.order) is None):
        raise MixesSamples("a mask of samples selects from others")
    if of.dim != 0 or not (is_anywhere(of.order) or of.order[:2] == ("rows", 1)):
        raise MixesSamples("what a mask selects lies in another order than the samples")
    picked = ("picked", call.version_of(mask) if not of.learned else ("learned", mask.place))
    return replace(rows(at, picked, of=flows), power=flow.power)


@enter("masked_select")
def masked_select(call: Call) -> Flow:
    """The entries that a mask selects, as one dimension."""
    seen, flow = call["self"], call.flow("self")
    mask, of = call["mask"], call.flow("mask")
    assert flow is not None and of is not None
    if seen.shape != mask.shape:
        raise MixesSamples("masked_select broadcasts its mask")
    if not flow.has_samples and not of.has_samples:
        return joined([flow, of])
    return _masked(call, seen, flow, [mask], [(0, mask, of)])


@enter("index_select")
def index_select(call: Call) -> Flow:
    """Selected entries along one dimension."""
    seen, flow, of = call["self"], call.flow("self"), call.flow("index")
    assert flow is not None and of is not None
    before: list[Seen | None] = [None] * call.dim(seen)
    return _indexed(call, seen, flow, [*before, call["index"]])


@enter(*OPS["gathers"])
def gather(call: Call) -> Flow:
    """For each entry, one entry along a dimension, selected by index."""
    seen = call["self"]
    given = list(call.tensors())
    if any(flow.kind in (Kind.SUM, Kind.POSITION) or flow.power for _, flow in given):
        raise MixesSamples(f"{call.base} of a sum over samples")
    flow = broadcast(call, given, len(seen.shape))
    if flow.has_samples and call.base == "gather" and not given[0][1].has_samples:
        # The same table for all samples: along any dimension except the indexed one, the entry
        # depends on the position of its index.
        if flow.dim != call.dim(seen):
            raise MixesSamples("gather takes entries of a table by the place of a sample")
        return flow
    if flow.has_samples and flow.dim == call.dim(seen):
        raise MixesSamples(f"{call.base} takes entries of one sample from others")
    if flow.has_samples and not all(one.has_samples or not tensor.shape for tensor, one in given):
        raise MixesSamples(f"{call.base} takes entries of a table by the place of a sample")
    return flow


@enter("index_put", "_index_put_impl", "_unsafe_index_put", "index_fill")
def index_put(call: Call) -> Flow:
    """Values are written to indexed entries."""
    seen, flow = call["self"], call.flow("self")
    values = call.flow("values") if isinstance(call["values"], Seen) else FREE
    assert flow is not None and values is not None
    indices = (
        call["indices"] if call.base != "index_fill" else [*[None] * call.dim(seen), call["index"]]
    )
    kinds = {one.kind for one in (flow, values)}
    if kinds & {Kind.SUM, Kind.POSITION} or values.power or flow.power:
        raise MixesSamples("a sum over samples is written to each")
    place = _indexed(call, seen, flow, indices)
    given = [call.flow_of(one) for one in indices if one is not None]
    if not any(one.has_samples for one in (flow, values, *given)):
        return joined([flow, values, *given])
    if not flow.has_samples:
        raise MixesSamples("samples write to what all have in common")
    if values.has_samples and same_order(place.order, values.order) is None:
        raise MixesSamples("samples write to others")
    return rows(flow.dim, flow.order, of=[flow, values, *given])


@enter("masked_scatter")
def masked_scatter(call: Call) -> Flow:
    """A mask's places are filled from a source, in order."""
    flow, mask, source = call.flow("self"), call.flow("mask"), call.flow("source")
    assert flow is not None and mask is not None and source is not None
    given = [flow, mask, source]
    if any(one.kind not in (Kind.FREE, Kind.ROWS) or one.power for one in given):
        raise MixesSamples("masked_scatter of a sum over samples")
    if not any(one.has_samples for one in given):
        return joined(given)
    if not (mask.has_samples and flow.has_samples and source.has_samples):
        raise MixesSamples("masked_scatter fills samples with what all have in common")
    if flow.dim != 0 or mask.dim != 0 or source.dim != 0:
        raise MixesSamples("masked_scatter fills in another order than that of the samples")
    if any(not is_anywhere(one.order) and one.order[:2] != ("rows", 1) for one in (mask, source)):
        raise MixesSamples("masked_scatter fills in another order than that of the samples")
    return rows(0, flow.order, of=[flow, mask, source])
