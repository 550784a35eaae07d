"""What is tried rather than heard, where the optimizer left the GPU: who waits where, who steps.

How many gradients wait on the GPU for the norm of all, how many blocks have their weights there,
how much state stays there, how much of it comes before that norm is known and what share of the
steps the host's cores make decides which copies meet in a step; how many rows the loss has at a
time, whether the allocator finds room between them. Only a rehearsal of the whole step knows what
that comes to, so each is moved for as long as it makes the step faster.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from oomph.planning.choices import Choices

#: Gradients that wait on the GPU, and blocks that stay there, as parts of all of them.
PARTS = tuple(part / 8 for part in range(1, 9))
#: What the host's cores may have to step.
SHARES = tuple(part / 10 for part in range(1, 10))
#: Buckets of state that come before all gradients are known, in those that come ahead anyway.
EARLY = tuple(range(2, 9))
#: Rows of the loss at a time, as parts of those that were planned so far.
CHUNKS = (2, 4)
#: How much faster a step must get for the next one to be tried.
WORTH_IT = 0.995


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Choices that fit the GPU, and the seconds of a step with them."""

    choices: Choices
    seconds: float
    host: int = 0
    """Bytes of host memory."""
    cleans: bool = False
    """Whether the allocator has to clean up its cache in every step."""


#: Tries choices; what comes back may make room for them in the blocks, and is None where it cannot.
Attempt = Callable[[Choices], Tried | None]
Move = Callable[[Choices], Choices]


def refine(
    best: Tried, attempt: Attempt, *, gradients: int, first: float, host_steps: bool
) -> Tried:
    """The fastest that was found; `gradients` are the bytes of all.

    `first` is the share of all parameters that the optimizer's first tensor has. `host_steps` says
    that it is known how fast the host's cores step.
    """
    best = _smaller_loss(best, attempt)
    if (room := best.choices.gradient_room) is not None:
        more = [size for part in PARTS if (size := int(part * gradients)) > room]
        best = _climb(best, [_setting(gradient_room=size) for size in more], attempt)
        between = (best.choices.gradient_room or 0) + gradients // 16
        best = _climb(best, [_setting(gradient_room=between)], attempt)
    if away := best.choices.weights_away:
        # Those that forward needs first have the least time to come.
        fewer = [away[math.ceil(part * len(away)) :] for part in PARTS]
        best = _climb(best, [_setting(weights_away=paths) for paths in fewer], attempt)
    best = _come_early(_let_stay(best, attempt, first), attempt)
    if host_steps:
        # Late: how fast the host is beside all else is what is known least.
        shared = _have_host_step(best, attempt)
        # What the host steps leaves room on the GPU.
        best = _come_early(shared, attempt) if shared is not best else best
    return _smaller_loss(best, attempt)


def _let_stay(best: Tried, attempt: Attempt, first: float) -> Tried:
    """With as much state on the GPU as makes it faster.

    An embedding is done last in backward, all at once: nothing would hide that its state comes.
    """
    shares = [math.ceil(share * 1000) / 1000 for share in (first, *PARTS) if first <= share < 1]
    moves = [_setting(gpu_share=share) for share in dict.fromkeys(shares)]
    return _climb(best, moves, attempt)


def _have_host_step(best: Tried, attempt: Attempt) -> Tried:
    """With as much stepped by the host's cores, of what is there, as makes it faster."""
    most = 1 - best.choices.gpu_share
    shares = [share for share in SHARES if share <= most]
    shared = _climb(best, [_setting(host_share=share) for share in shares], attempt)
    half_more = round(shared.choices.host_share + SHARES[0] / 2, 2)
    return _climb(shared, [_setting(host_share=half_more)] if half_more <= most else [], attempt)


def _smaller_loss(best: Tried, attempt: Attempt) -> Tried:
    """With fewer rows of the loss at a time, for which the allocator finds room in one piece."""
    chunk = best.choices.loss_chunk
    less = [chunk // part for part in CHUNKS] if chunk and best.cleans else []
    return _climb(best, [_setting(loss_chunk=rows) for rows in less if rows], attempt)


def _come_early(best: Tried, attempt: Attempt) -> Tried:
    """With as much state before the norm of all gradients as makes it faster."""
    if best.choices.gradient_room is None:
        return best
    counts = [times * best.choices.state_ahead for times in EARLY]
    more = [count for count in counts if count > best.choices.state_early]
    return _climb(best, [_setting(state_early=count) for count in more], attempt)


def _setting(**fields: object) -> Move:
    return lambda choices: dataclasses.replace(choices, **fields)  # type: ignore[arg-type]


def _climb(best: Tried, moves: Iterable[Move], attempt: Attempt) -> Tried:
    """Go on for as long as the next is faster."""
    for move in moves:
        found = attempt(move(best.choices))
        if found is None or found.seconds > WORTH_IT * best.seconds:
            break
        best = found
    return best
