"""Products of matrices."""

from __future__ import annotations

from dataclasses import replace

from oomph.splitting.call import Call, MixesSamples
from oomph.splitting.flow import (
    Flow,
    Kind,
    joined,
    rows,
    same_order,
)
from oomph.splitting.rules.elementwise import refuse_power
from oomph.splitting.rules.reductions import over_samples
from oomph.splitting.rules.registry import enter

#: Where a factor's dimension goes: to a dimension of the result, or summed over (-1).
_SUMMED = -1
_PRODUCTS: dict[str, tuple[tuple[str, dict[int, int]], tuple[str, dict[int, int]]]] = {
    "mm": (("self", {0: 0, 1: _SUMMED}), ("mat2", {0: _SUMMED, 1: 1})),
    "addmm": (("mat1", {0: 0, 1: _SUMMED}), ("mat2", {0: _SUMMED, 1: 1})),
    "_addmm_activation": (("mat1", {0: 0, 1: _SUMMED}), ("mat2", {0: _SUMMED, 1: 1})),
    "bmm": (("self", {0: 0, 1: 1, 2: _SUMMED}), ("mat2", {0: 0, 1: _SUMMED, 2: 2})),
    "baddbmm": (("batch1", {0: 0, 1: 1, 2: _SUMMED}), ("batch2", {0: 0, 1: _SUMMED, 2: 2})),
    "mv": (("self", {0: 0, 1: _SUMMED}), ("vec", {0: _SUMMED})),
    "addmv": (("mat", {0: 0, 1: _SUMMED}), ("vec", {0: _SUMMED})),
    "dot": (("self", {0: _SUMMED}), ("tensor", {0: _SUMMED})),
    "vdot": (("self", {0: _SUMMED}), ("other", {0: _SUMMED})),
    "addr": (("vec1", {0: 0}), ("vec2", {0: 1})),
}


@enter(*_PRODUCTS)
def product(call: Call) -> Flow:
    """A product of matrices."""
    (one_name, one_map), (other_name, other_map) = _PRODUCTS[call.base]
    one, other = call.flow(one_name), call.flow(other_name)
    assert one is not None and other is not None
    made = replace(joined([one, other]), power=one.power + other.power)
    flow = _multiplied(call, (one, one_map), (other, other_map), made)
    added = call.flow("self") if call.base.startswith(("add", "_add", "badd")) else None
    if added is None or (flow.kind is Kind.FREE and added.kind is Kind.FREE):
        return flow if added is None else replace(joined([flow, added]), power=flow.power)
    if flow.kind is not Kind.ROWS or flow.power:
        raise MixesSamples(f"{call.base} adds to a sum over samples")
    if added.has_samples:
        at = added.dim + len(call.out.shape) - len(call["self"].shape)
        order = same_order(flow.order, added.order)
        if at != flow.dim or order is None:
            raise MixesSamples(f"{call.base} combines each sample with others")
        flow = replace(flow, order=order)
    elif not added.is_whole:
        raise MixesSamples(f"{call.base} adds a sum over samples to each")
    return replace(rows(flow.dim, flow.order, of=[flow, added]), power=flow.power)


@enter("_euclidean_dist", "_cdist_forward")
def distances(call: Call) -> Flow:
    """Distances between the rows of two tables; dimensions before these are independent."""
    refuse_power(call)
    flows = []
    for name, at in (("x1", 2), ("x2", 1)):
        seen, flow = call[name], call.flow(name)
        assert flow is not None
        if flow.kind not in (Kind.FREE, Kind.ROWS):
            raise MixesSamples(f"{call.base} of a sum over samples")
        if flow.has_samples:
            from_behind = len(seen.shape) - flow.dim
            if from_behind == 1:
                raise MixesSamples(f"{call.base} goes over the samples of the batch")
            flows.append((from_behind if from_behind > 2 else at, flow.order))
    made = joined(flow for _, flow in call.tensors())
    if not flows:
        return made
    order = flows[0][1] if len(flows) == 1 else same_order(flows[0][1], flows[1][1])
    if order is None or len({at for at, _ in flows}) > 1:
        raise MixesSamples(f"{call.base} compares each sample with others")
    return rows(len(call.out.shape) - flows[0][0], order, of=[made])


def _multiplied(
    call: Call, one: tuple[Flow, dict[int, int]], other: tuple[Flow, dict[int, int]], made: Flow
) -> Flow:
    flows = one[0], other[0]
    if any(flow.kind is Kind.POSITION for flow in flows):
        raise MixesSamples(f"{call.base} counts samples by their place in the batch")
    targets = [where[flow.dim] for flow, where in (one, other) if flow.has_samples]
    sums = [flow for flow in flows if flow.kind is Kind.SUM]
    if sums:
        if targets or len(sums) > 1:
            raise MixesSamples(f"{call.base} multiplies sums over samples")
        return replace(made, kind=Kind.SUM)
    if not targets:
        return made
    orders = [flow.order for flow in flows if flow.has_samples]
    order = orders[0] if len(orders) == 1 else same_order(*orders)
    if order is None or len(set(targets)) > 1:
        raise MixesSamples(f"{call.base} multiplies each sample with others")
    if targets[0] == _SUMMED:
        if len(targets) == 1:
            raise MixesSamples(f"{call.base} weighs samples by their place in the batch")
        return over_samples(call, replace(made, kind=Kind.ROWS, order=order), "sum")
    return replace(made, kind=Kind.ROWS, dim=targets[0], order=order)
