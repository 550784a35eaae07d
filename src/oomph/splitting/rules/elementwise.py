"""Elementwise ops: arguments are broadcast, and each sample is combined only with itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from oomph.splitting.call import Call, MixesSamples
from oomph.splitting.flow import (
    ANY,
    SAME,
    Flow,
    Kind,
    Order,
    joined,
    rows,
    same_order,
)
from oomph.splitting.rules.registry import OPS
from oomph.splitting.trace import Seen


def elementwise(call: Call) -> Flow:
    """Arguments are broadcast, and each sample is combined only with itself."""
    given = list(call.tensors())
    if any(flow.kind is Kind.SUM for _, flow in given):
        return _with_sums(call, given)
    flow = broadcast(call, given, len(call.out.shape))
    asks = call.base in OPS["ask_if_finite"] or (
        bool(given)
        and all(one.asks_if_finite or not one.learned for _, one in given)
        and any(one.asks_if_finite for _, one in given)
    )
    try:
        power = _power(call, given)
    except MixesSamples:
        # A count of the batch combined with its size: both can be computed for the whole batch.
        if flow.kind is not Kind.FREE or flow.learned or call.out.shape or not given:
            raise
        return replace(flow, needs=flow.needs | {call.need("total")})
    return replace(flow, power=power, asks_if_finite=asks)


def broadcast(call: Call, given: Sequence[tuple[Seen, Flow]], width: int) -> Flow:
    """The flow of tensors combined entry by entry into a result with `width` dimensions."""
    at: int | None = None
    order: Order = SAME
    for seen, flow in given:
        if flow.kind is Kind.POSITION and call.base not in OPS["same_numbers"]:
            raise MixesSamples(f"{call.base} counts samples by their place in the batch")
        if not flow.has_samples:
            continue
        here = flow.dim + width - len(seen.shape)
        both = same_order(order, flow.order)
        if (at is not None and at != here) or both is None:
            raise MixesSamples(f"{call.base} combines each sample with others")
        at, order = here, both
    if at is None:
        return joined(flow for _, flow in given)
    kind = Kind.POSITION if any(f.kind is Kind.POSITION for _, f in given) else Kind.ROWS
    if order == SAME and is_random(call):
        order = ANY
    return replace(rows(at, order, of=[flow for _, flow in given]), kind=kind)


def _power(call: Call, given: Sequence[tuple[Seen, Flow]]) -> int:
    """The power of an elementwise result."""
    base = call.base
    if base == "div" and call["rounding_mode"] is not None:
        base = "floor_divide"
    numbers = [call.power_of(one, other) for one, other in call.numbers()]
    powers = [flow.power for _, flow in given]
    if None in numbers:
        raise MixesSamples(f"{base} uses a number that depends on how many samples there are")
    if not any(powers) and not any(numbers):
        return 0
    if base == "mul":
        return sum(powers) + sum(one or 0 for one in numbers)
    if base == "div":
        rest = powers[1:] + [one or 0 for one in numbers]
        return powers[0] - sum(rest)
    if base in OPS["homogeneous"] and not any(numbers):
        return powers[0]
    is_sum = base in ("add", "sub", "rsub", "maximum", "minimum", "where")
    if is_sum and len(given) > 1 and len(set(powers)) == 1 and not any(numbers):
        return powers[0]
    raise MixesSamples(f"{base} of something that depends on how many samples there are")


def _with_sums(call: Call, given: Sequence[tuple[Seen, Flow]]) -> Flow:
    """An elementwise op with an argument that is a sum over samples."""
    base, flows = call.base, [flow for _, flow in given]
    if any(flow.has_samples for flow in flows):
        raise MixesSamples(f"{base} combines each sample with a sum over all")
    sums = [flow for flow in flows if flow.kind is Kind.SUM]
    made = replace(joined(flows), kind=Kind.SUM)
    if base in OPS["linear"]:
        return replace(made, power=sums[-1].power)
    if base == "nan_to_num" and not call.out.shape:
        # It changes nothing as long as the sum is finite, which is checked for each part.
        return replace(made, power=sums[0].power, needs=made.needs | {call.need("finite")})
    if call["rounding_mode"] is not None:
        raise MixesSamples("a sum over samples is divided without a remainder")
    if base in ("mul", "div") and len(sums) == 1 and (base == "mul" or flows[0] is sums[0]):
        return replace(made, power=_power(call, given))
    if base in ("add", "sub", "rsub"):
        return replace(made, power=_added(call, given))
    raise MixesSamples(f"{base} of a sum over samples is no sum over samples")


def _added(call: Call, given: Sequence[tuple[Seen, Flow]]) -> int:
    """The power of a sum of sums; terms that do not depend on samples count as means."""
    if any(call.power_of(one, other) != 0 for one, other in call.numbers()):
        raise MixesSamples("a term of the loss depends on how many samples there are")
    powers = {flow.power for _, flow in given if flow.kind is Kind.SUM}
    plain = [flow for _, flow in given if flow.kind is not Kind.SUM]
    if any(flow.power for flow in plain):
        raise MixesSamples("a term of the loss depends on how many samples there are")
    number = call["other"]
    if plain or (isinstance(number, (int, float)) and number):
        powers.add(1)
    if len(powers) == 1:
        return powers.pop()
    for seen, flow in given:
        if flow.kind is Kind.SUM and flow.power != 1:
            raise Rescale(seen)
    raise AssertionError("terms of different powers, none of which is another than 1")


class Rescale(Exception):
    """This sum over samples must become a mean before the op; the analysis then restarts."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen


def refuse_power(call: Call) -> None:
    """Reject arguments that depend on how many samples there are."""
    if any(flow.power for _, flow in call.tensors()):
        raise MixesSamples(f"{call.base} of something that depends on how many samples there are")


def is_random(call: Call) -> bool:
    """Whether an op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in call.step.func.tags and call["p"] != 0
