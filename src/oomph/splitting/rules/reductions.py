"""Ops that reduce many numbers to one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from oomph.splitting.call import Call, MixesSamples
from oomph.splitting.flow import (
    SAME,
    Flow,
    Kind,
    joined,
)
from oomph.splitting.rules.elementwise import elementwise
from oomph.splitting.rules.registry import OPS, enter
from oomph.splitting.trace import Seen

#: Reductions that return, for many equal numbers, that number.
_OF_ONE_AS_OF_MANY = frozenset(("mean", "amax", "amin", "max", "min", "all", "any"))
_KEEP_POWER = frozenset(("sum", "mean", "amax", "amin", "max", "min", "linalg_vector_norm", "norm"))


@enter(*OPS["reductions"])
def reduce(call: Call) -> Flow:
    """Some dimensions are reduced to one number."""
    seen, flow = call["self"], call.flow("self")
    assert flow is not None
    if isinstance(call["other"], Seen):
        return elementwise(call)
    if flow.kind is Kind.SUM:
        if call.base in ("sum", "mean"):
            return flow
        raise MixesSamples(f"{call.base} of a sum over samples")
    if not flow.has_samples:
        if flow.power and call.base not in _KEEP_POWER:
            raise MixesSamples(
                f"{call.base} of something that depends on how many samples there are"
            )
        return flow
    if flow.kind is Kind.POSITION:
        raise MixesSamples(f"{call.base} counts samples by their place in the batch")
    if flow.power and call.base not in _KEEP_POWER:
        raise MixesSamples(f"{call.base} of something that depends on how many samples there are")
    dims = call.dims(seen)
    if flow.dim not in dims:
        kept = bool(call["keepdim"])
        left = flow.dim if kept else flow.dim - sum(at < flow.dim for at in dims)
        return replace(flow, kind=Kind.ROWS, dim=left)
    return over_samples(call, flow)


def over_samples(call: Call, flow: Flow, how: str = "") -> Flow:
    """The flow of a reduction over all samples: a constant, a sum, or unknown."""
    how = how or call.base
    if flow.order == SAME and how in _OF_ONE_AS_OF_MANY:
        return replace(joined([flow]), power=flow.power)
    if not flow.learned:
        return batch_total(call, [flow])
    asks = flow.asks_if_finite and how in ("any", "all", "sum")
    result = replace(flow, kind=Kind.SUM, dim=0, order=SAME)
    if how == "sum":
        return result
    if how == "mean":
        if flow.order[0] != "picked":
            return replace(result, power=flow.power + 1)
        return replace(result, needs=flow.needs | {call.need("mean")}, power=flow.power + 1)
    if asks:
        return replace(result, asks_if_finite=True)
    raise MixesSamples(f"{how} goes over the samples of the batch")


def batch_total(call: Call, flows: Sequence[Flow]) -> Flow:
    """The flow of a value made from all samples of the batch, and from nothing learned."""
    if any(flow.power for flow in flows):
        raise MixesSamples("a count of the batch depends on how many samples there are")
    made = joined(flows)
    return replace(made, needs=made.needs | {call.need("total")})
