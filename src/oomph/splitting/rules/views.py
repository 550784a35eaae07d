"""Ops that view or copy the same numbers in another shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from oomph.splitting.call import Call, MixesSamples
from oomph.splitting.flow import (
    SAME,
    Flow,
    Kind,
    Order,
    is_anywhere,
    joined,
    rows,
    same_order,
)
from oomph.splitting.rules.creation import varying_dims
from oomph.splitting.rules.elementwise import Rescale, broadcast
from oomph.splitting.rules.registry import enter
from oomph.splitting.trace import Seen


@enter("view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten")
def reshape(call: Call) -> Flow:
    """The same numbers in another shape: samples must stay together."""
    seen, flow = single(call)
    if not flow.has_samples:
        return flow
    if seen.shape == call.out.shape:
        return flow
    if is_anywhere(flow.order):
        varying = varying_dims(call)
        if len(varying) != 1:
            raise MixesSamples("a reshape takes samples apart")
        return flow.moved(varying[0])
    if flow.order[0] == "picked":
        return _reshape_picked(call, seen, flow)
    _, outer, inner = flow.order
    assert isinstance(outer, int) and isinstance(inner, int)
    before = outer * _product(seen.shape[: flow.dim])
    behind = inner * _product(seen.shape[flow.dim + 1 :])
    shape, count = call.out.shape, call.samples[0]
    for at, size in enumerate(shape):
        now_before, now_behind = _product(shape[:at]), _product(shape[at + 1 :])
        if not now_before or not now_behind or before % now_before or behind % now_behind:
            continue
        order = ("rows", before // now_before, behind // now_behind)
        if size == order[1] * count * order[2]:
            kind = flow.kind if order[1:] == (1, 1) else Kind.ROWS
            if flow.kind is Kind.POSITION and kind is not flow.kind:
                break
            return replace(flow, dim=at, order=order)
    raise MixesSamples("a reshape takes samples apart")


def _reshape_picked(call: Call, seen: Seen, flow: Flow) -> Flow:
    """The entries that a mask selected have a dimension of their own, which must stay."""
    before = seen.shape[: flow.dim]
    behind = _product(seen.shape[flow.dim + 1 :])
    shape = call.out.shape
    same = shape[: flow.dim] == before and len(shape) > flow.dim
    if same and _product(shape[flow.dim + 1 :]) == behind:
        return flow
    raise MixesSamples("a reshape takes apart what a mask selected")


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def single(call: Call) -> tuple[Seen, Flow]:
    """The first argument that is a tensor."""
    return next(iter(call.tensors()))


@enter("unsqueeze")
def unsqueeze(call: Call) -> Flow:
    """Adds a dimension of size one."""
    seen, flow = single(call)
    at = int(call["dim"]) % (len(seen.shape) + 1)
    return flow.moved(flow.dim + (at <= flow.dim)) if flow.has_samples else flow


@enter("squeeze")
def squeeze(call: Call) -> Flow:
    """Removes dimensions of size one."""
    seen, flow = single(call)
    if not flow.has_samples:
        return flow
    asked = call.dims(seen) if "dim" in call.step.given else range(len(seen.shape))
    gone = [at for at in asked if seen.shape[at] == 1]
    if flow.dim in gone:
        raise MixesSamples("squeeze drops the dimension of the samples")
    return flow.moved(flow.dim - sum(at < flow.dim for at in gone))


@enter("transpose", "swapaxes", "t", "numpy_T", "mT", "adjoint")
def transpose(call: Call) -> Flow:
    """Swaps two dimensions."""
    seen, flow = single(call)
    if not flow.has_samples or len(seen.shape) < 2:
        return flow
    if "dim0" in call.step.given:
        one, other = call.dim(seen, "dim0"), call.dim(seen, "dim1")
    else:
        one, other = len(seen.shape) - 2, len(seen.shape) - 1
    return flow.moved({one: other, other: one}.get(flow.dim, flow.dim))


@enter("permute")
def permute(call: Call) -> Flow:
    """Reorders the dimensions."""
    seen, flow = single(call)
    return flow.moved(call.dims(seen, "dims").index(flow.dim)) if flow.has_samples else flow


@enter("expand")
def expand(call: Call) -> Flow:
    """Repeats numbers along dimensions, as a view."""
    seen, flow = single(call)
    varying = varying_dims(call)
    more = len(call.out.shape) - len(seen.shape)
    if flow.has_samples:
        return flow.moved(flow.dim + more)
    if not varying:
        return flow
    if len(varying) > 1 or flow.kind is Kind.SUM:
        raise MixesSamples("expand shows a number for each sample")
    return replace(rows(varying[0], SAME, of=[flow]), power=flow.power)


@enter("repeat")
def repeat(call: Call) -> Flow:
    """Copies of a tensor, one after the other."""
    seen, flow = single(call)
    repeats = [int(one) for one in call["repeats"]]
    varying = varying_dims(call)
    more = len(repeats) - len(seen.shape)
    if flow.has_samples:
        if flow.kind is Kind.POSITION or varying != [flow.dim + more] or flow.order[0] == "picked":
            raise MixesSamples("repeat makes copies for each sample of samples")
        times = repeats[flow.dim + more]
        order = flow.order
        if not is_anywhere(order) and times > 1:
            order = ("rows", times * int(str(order[1])), order[2])
        return replace(flow, kind=Kind.ROWS, dim=flow.dim + more, order=order)
    if not varying:
        return flow
    if len(varying) > 1 or flow.kind is Kind.SUM:
        raise MixesSamples("repeat shows a number for each sample")
    at = varying[0]
    own = seen.shape[at - more] if at >= more else 1
    if call.out.shape[at] != own * call.samples[0]:
        raise MixesSamples("repeat makes copies in an order of its own")
    return replace(rows(at, ("rows", 1, own) if own > 1 else SAME, of=[flow]), power=flow.power)


@enter("slice", "narrow")
def slice_(call: Call) -> Flow:
    """A part of one dimension."""
    seen, flow = single(call)
    if not flow.has_samples or call.dim(seen) != flow.dim:
        if call["start"] != call.other.given.get("start"):
            raise MixesSamples("what a slice shows depends on how many samples there are")
        return flow
    if call.out.shape[flow.dim] == seen.shape[flow.dim]:
        return flow
    if flow.order[0] != "rows":
        raise MixesSamples("a slice takes some samples apart from others")
    _, outer, inner = flow.order
    assert isinstance(outer, int) and isinstance(inner, int)
    unit = call.samples[0] * inner
    start = int(call["start"] or 0)
    start = start + seen.shape[flow.dim] if start < 0 else start
    length = call.out.shape[flow.dim]
    if start % unit or length % unit or call["step"] not in (None, 1):
        raise MixesSamples("a slice takes some samples apart from others")
    return replace(flow, order=("rows", length // unit, inner))


@enter("select")
def select(call: Call) -> Flow:
    """One entry of one dimension."""
    seen, flow = single(call)
    if not flow.has_samples:
        return flow
    at = call.dim(seen)
    if at == flow.dim:
        raise MixesSamples("one sample is taken out of the batch")
    return flow.moved(flow.dim - (at < flow.dim))


@enter("unbind")
def unbind(call: Call) -> Flow:
    """All entries of one dimension, one by one."""
    return select(call)


@enter(
    "split",
    "split_with_sizes",
    "split_with_sizes_copy",
    "unsafe_split",
    "unsafe_split_with_sizes",
    "chunk",
    "unsafe_chunk",
    "tensor_split",
)
def split(call: Call) -> Flow:
    """Parts of one dimension."""
    seen, flow = single(call)
    if not flow.has_samples or call.dim(seen) != flow.dim:
        return flow
    if flow.order[0] == "rows":
        _, outer, inner = flow.order
        assert isinstance(outer, int) and isinstance(inner, int)
        unit = call.samples[0] * inner
        sizes = {one.shape[flow.dim] for one in call.step.made()}
        if len(sizes) == 1 and not min(sizes) % unit:
            return replace(flow, order=("rows", min(sizes) // unit, inner))
    raise MixesSamples("the batch is taken apart into groups of samples")


@enter("cat")
def cat(call: Call) -> Flow:
    """Tensors concatenated along one dimension."""
    given = [(seen, flow) for seen, flow in call.tensors() if seen.shape != (0,)]
    seen, first = given[0]
    flows = [flow for _, flow in given]
    if any(flow.kind is Kind.POSITION for flow in flows):
        raise MixesSamples("cat counts samples by their place in the batch")
    at = call.dim(seen)
    if any(flow.kind is Kind.SUM for flow in flows):
        return _gathered_sums(call, given)
    if not any(flow.has_samples for flow in flows):
        return replace(joined(flows), power=_one_power(call, flows))
    if not all(flow.has_samples for flow in flows) or len({flow.dim for flow in flows}) > 1:
        raise MixesSamples("cat puts samples beside something else")
    power = _one_power(call, flows)
    if at != first.dim:
        order: Order | None = SAME
        for flow in flows:
            order = same_order(order or SAME, flow.order) if order is not None else None
        if order is None:
            raise MixesSamples("cat puts samples beside others")
        return replace(rows(first.dim, order, of=flows), power=power)
    if len(flows) == 1:
        return first
    inner, outer = set(), 0
    for one, flow in given:
        order = flow.order
        if is_anywhere(order):
            order = ("rows", 1, one.shape[at] // call.samples[0])
        if order[0] != "rows":
            raise MixesSamples("cat puts what a mask selected behind each other")
        outer += int(str(order[1]))
        inner.add(order[2])
    if len(inner) > 1:
        raise MixesSamples("cat puts samples of different lengths behind each other")
    return replace(rows(at, ("rows", outer, inner.pop()), of=flows), power=power)


def _one_power(call: Call, flows: Sequence[Flow]) -> int:
    powers = {flow.power for flow in flows}
    if len(powers) > 1:
        raise MixesSamples(f"{call.base} of terms that depend on how many samples there are")
    return powers.pop()


@enter("stack")
def stack(call: Call) -> Flow:
    """Tensors of one shape, stacked along a new dimension."""
    given = list(call.tensors())
    flows = [flow for _, flow in given]
    if any(flow.kind is Kind.SUM for flow in flows):
        return _gathered_sums(call, given)
    at = int(call["dim"] or 0) % (len(given[0][0].shape) + 1)
    flow = broadcast(call, given, len(given[0][0].shape))
    if flow.has_samples and not all(one.has_samples for one in flows):
        raise MixesSamples("stack puts samples beside something else")
    flow = replace(flow, power=_one_power(call, flows))
    return flow.moved(flow.dim + (at <= flow.dim)) if flow.has_samples else flow


def _gathered_sums(call: Call, given: Sequence[tuple[Seen, Flow]]) -> Flow:
    """Sums over samples, gathered in one tensor."""
    flows = [flow for _, flow in given]
    if any(flow.has_samples for flow in flows):
        raise MixesSamples(f"{call.base} puts samples beside a sum over all")
    powers = {flow.power if flow.kind is Kind.SUM else 1 for flow in flows}
    for seen, flow in given:
        if len(powers) > 1 and flow.kind is Kind.SUM and flow.power != 1:
            raise Rescale(seen)
    return replace(joined(flows), kind=Kind.SUM, power=powers.pop())


@enter("as_strided")
def as_strided(call: Call) -> Flow:
    """Any strided view."""
    seen, flow = single(call)
    if not flow.has_samples or seen.shape == call.out.shape:
        return flow
    raise MixesSamples("as_strided shows samples in an order of its own")
