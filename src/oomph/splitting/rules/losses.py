"""Losses that are a single op."""

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
from oomph.splitting.rules.elementwise import broadcast, refuse_power
from oomph.splitting.rules.per_sample import first_dim
from oomph.splitting.rules.reductions import over_samples
from oomph.splitting.rules.registry import OPS, enter

_NONE, _MEAN = 0, 1


@enter(*OPS["losses_by_element"])
def loss_by_element(call: Call) -> Flow:
    """An error for each element, or their mean or sum."""
    given = list(call.tensors())
    if any(flow.kind is Kind.SUM or flow.power for _, flow in given):
        raise MixesSamples(f"{call.base} of a sum over samples")
    flow = broadcast(call, given, max(len(seen.shape) for seen, _ in given))
    if call["reduction"] == _NONE or not flow.has_samples:
        return flow
    return over_samples(call, flow, "mean" if call["reduction"] == _MEAN else "sum")


@enter("multi_margin_loss")
def margin_loss(call: Call) -> Flow:
    """An error for each sample, given its class."""
    flow = first_dim("self", "target")(call)
    if call["reduction"] == _NONE or not flow.has_samples:
        return flow
    return over_samples(call, flow, "mean" if call["reduction"] == _MEAN else "sum")


@enter("nll_loss_forward", "nll_loss2d_forward")
def class_targets(call: Call) -> Flow:
    """A loss for each target that counts, or their mean or sum."""
    flow, target = call.flow("self"), call.flow("target")
    weight = call.flow("weight")
    assert flow is not None and target is not None
    if weight is not None and not weight.is_whole:
        raise MixesSamples("each sample has class weights of its own")
    given = [flow, target, *([weight] if weight is not None else [])]
    if any(one.kind in (Kind.SUM, Kind.POSITION) or one.power for one in given):
        raise MixesSamples("the loss is one of sums over samples")
    if not flow.has_samples and not target.has_samples:
        return joined(given)
    order = same_order(flow.order, target.order)
    if flow.dim != 0 or target.dim != 0 or order is None or flow.kind is not Kind.ROWS:
        raise MixesSamples("the loss compares samples with each other")
    if target.kind is not Kind.ROWS:
        raise MixesSamples("the targets of the loss are places in the batch")
    refuse_power(call)
    if call["reduction"] == _NONE:
        return rows(0, order, of=given)
    made = replace(joined(given), kind=Kind.SUM, learned=True)
    if call["reduction"] != _MEAN:
        return made
    if target.learned:
        raise MixesSamples("how many targets count is decided by the model")
    return replace(made, power=1, needs=made.needs | {call.need("targets")})


def _check_lengths(call: Call, name: str, samples: Flow) -> None:
    """Reject lengths that are not those of a part's own samples."""
    lengths = call.flow(name)
    if lengths is None:
        given = call[name], call.other.given[name]
        counts = tuple(map(len, given))
        if counts != call.samples or len({one for each in given for one in each}) != 1:
            raise MixesSamples("ctc_loss is given lengths that are made in Python")
    elif (
        lengths.kind is not Kind.ROWS
        or lengths.dim != 0
        or same_order(lengths.order, samples.order) is None
    ):
        raise MixesSamples("the lengths that ctc_loss is given are not those of the samples")


@enter("_ctc_loss")
def ctc(call: Call) -> Flow:
    """A loss for each sequence; time is the first dimension, samples the second."""
    flow = call.flow("log_probs")
    assert flow is not None
    if any(one.kind in (Kind.SUM, Kind.POSITION) or one.power for _, one in call.tensors()):
        raise MixesSamples("ctc_loss of sums over samples")
    if not flow.has_samples:
        return joined(one for _, one in call.tensors())
    if flow.dim != 1 or flow.kind is not Kind.ROWS:
        raise MixesSamples("ctc_loss takes the samples for a sequence")
    targets = call.flow("targets")
    if targets is None or targets.kind is not Kind.ROWS or targets.dim != 0:
        raise MixesSamples("the targets of ctc_loss are not those of the batch")
    for name in ("input_lengths", "target_lengths"):
        _check_lengths(call, name, flow)
    return rows(0, flow.order, of=[one for _, one in call.tensors()])
