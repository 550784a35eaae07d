"""Ops that create tensors from no other: the same in every part, or drawn anew in each."""

from __future__ import annotations

from dataclasses import replace

from oomph.rehearsal.values import bounds_of_draws
from oomph.splitting.call import Call, MixesSamples
from oomph.splitting.flow import (
    ANY,
    FREE,
    SAME,
    Flow,
    Kind,
    mixed,
    rows,
)
from oomph.splitting.rules.elementwise import elementwise, is_random
from oomph.splitting.rules.registry import OPS, enter


@enter(*OPS["like"])
def like(call: Call) -> Flow:
    """Takes another tensor's shape, and none of its contents."""
    flow = call.flow("self")
    assert flow is not None
    order = ANY if is_random(call) and flow.order == SAME else flow.order
    return rows(flow.dim, order) if flow.has_samples else FREE


@enter(*OPS["uniform"])
def uniform(call: Call) -> Flow:
    """The same in every part, or drawn anew in each; the shape shows if it has samples."""
    for flow in [flow for _, flow in call.tensors()]:
        if call.base in ("normal", "bernoulli") and flow.kind is not Kind.FREE:
            return elementwise(call)
    varying = varying_dims(call)
    power = _power_of_contents(call)
    if not varying:
        return replace(FREE, power=power)
    if len(varying) > 1:
        raise MixesSamples(f"{call.base} makes a table of samples by samples")
    return replace(rows(varying[0], ANY if is_random(call) else SAME), power=power)


def _power_of_contents(call: Call) -> int:
    """How the fill value scales with the samples."""
    power: int | None = 0
    for name in ("fill_value", "s", *_CHANCES):
        mine, theirs = call[name], call.other.given.get(name)
        if isinstance(mine, (int, float)) and isinstance(theirs, (int, float)):
            power = call.power_of(mine, theirs)
            if power is None or (power and name in _CHANCES):
                raise MixesSamples(
                    f"{call.base} uses a number that depends on how many samples there are"
                )
    return power or 0


def drawn_for_all(call: Call) -> Flow:
    """Random numbers without an entry for each sample: each part would draw others."""
    bounds = bounds_of_draws(call.step.func, list(call.step.given.values()))
    return replace(
        mixed(f"random numbers that all samples have in common are drawn ({call.base})"),
        drawn_between=bounds,
    )


def is_decided(call: Call) -> bool:
    """Whether numbers that are drawn compare with a plain one in the same way, whatever they are.

    As where a model draws whether to leave out a layer, with a chance of zero.
    """
    flow, number = call.flow("self"), call["other"]
    if flow is None or flow.drawn_between is None or not isinstance(number, (int, float)):
        return False
    smallest, end = flow.drawn_between
    if call.base in ("lt", "ge"):
        return number <= smallest or number >= end
    return call.base in ("le", "gt") and (number < smallest or number >= end)


#: Parameters of random distributions.
_CHANCES = ("mean", "std", "p", "low", "high")


@enter("arange")
def arange(call: Call) -> Flow:
    """0, 1, 2 … with as many entries as there are samples, or with a fixed number of them."""
    varying = varying_dims(call)
    if not varying and all(call.power_of(one, other) == 0 for one, other in call.numbers()):
        return FREE
    if not varying:
        raise MixesSamples("arange counts from how many samples there are")
    starts = call["start"] in (None, 0) and call["step"] in (None, 1)
    if not starts or call.out.shape[0] != call.samples[0]:
        raise MixesSamples("arange counts what the samples are made of")
    return Flow(kind=Kind.POSITION, dim=0, order=("rows", 1, 1))


def varying_dims(call: Call) -> list[int]:
    """Dimensions of the first result that differ between the two forwards."""
    one, other = call.out.shape, next(call.other.made()).shape
    return [at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]]
