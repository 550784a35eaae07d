"""What is tried rather than heard, where the optimizer left the GPU: who waits where, who steps.

How many gradients wait on the GPU for the norm of all, how many blocks have their weights there,
how much state stays there, how much of it comes before that norm is known and what share of the
steps the host's cores make decides which copies meet in a step; how many rows the loss has at a
time, whether the allocator finds room between them. Only a rehearsal of the whole step knows what
that comes to, so each is moved for as long as it makes the step faster.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oomph.planning.choices import Choices

#: Gradients that wait on the GPU, and blocks that stay there, as parts of all of them.
PARTS = tuple(part / 8 for part in range(1, 9))
#: What the host's cores may have to step, and by how much less or more that is tried then.
SHARES = (0.2, 0.4, 0.6, 0.8)
SHARES_BETWEEN = (0.1, -0.1)
#: Buckets of state that come before all gradients are known, in those that come ahead anyway.
EARLY = tuple(range(2, 9))
#: Rows of the loss at a time, as parts of those that were planned so far.
CHUNKS = (2, 4)
#: How much faster a step must get for the next one to be tried.
WORTH_IT = 0.995
#: How much slower a first share of the host may seem for the next to be tried all the same.
NEARLY = 1.05


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
#: Hears what is likely to be tried, in this order.
Foresee = Callable[[Sequence[Choices]], None]
Move = Callable[[Choices], Choices]
#: Moves from what is best so far, each to be made on top of the one before.
Climb = Callable[[Tried], list[Move]]


def refine(
    best: Tried,
    attempt: Attempt,
    *,
    gradients: int,
    first: float,
    host_steps: bool,
    foresee: Foresee = lambda _: None,
) -> Tried:
    """The fastest that was found; `gradients` are the bytes of all.

    `first` is the share of all parameters that the optimizer's first tensor has. `host_steps` says
    that it is known how fast the host's cores step.
    """
    # Of these the first move helps, as a rule, and those after it do not.
    mostly_once: list[Climb] = [
        functools.partial(_let_stay, first),
        functools.partial(_let_first_stay, first),
    ]
    climbs: list[Climb] = [
        _smaller_loss,
        functools.partial(_more_room, gradients),
        functools.partial(_a_little_more_room, gradients),
        _fewer_away,
        *mostly_once,
        _come_early,
    ]
    if host_steps:
        # Late: how fast the host is beside all else is what is known least.
        between = [functools.partial(_share_between, by) for by in SHARES_BETWEEN]
        climbs += [_share, *between, _come_early_beside_a_share]
    climbs.append(_smaller_loss)
    more_away = best.choices.weights_away
    for at, climb in enumerate(climbs):
        # Go on for as long as the next is faster.
        moves = climb(best)
        for done, move in enumerate(moves):
            if done and climb is _smaller_loss and not best.cleans:
                break
            # It is made for that, or the rule; else one of its like did, where more of it may help.
            once = (climb is _smaller_loss and best.cleans) or (climb in mostly_once and not done)
            helps = once or (done > 0 and climb not in (*mostly_once, _share))
            coming = moves[done : done + 1] if once else moves[done:]
            foresee(_likely(best, coming, climbs[at + 1 :], helps=helps))
            found = attempt(move(best.choices))
            if found is None and climb is _share and more_away != best.choices.weights_away:
                # The last weights that stayed may have taken the room for it.
                found = attempt(dataclasses.replace(move(best.choices), weights_away=more_away))
            if found is None or found.seconds > WORTH_IT * best.seconds:
                if climb is _share and not done and found is not None and _is_near(found, best):
                    continue
                break
            if climb is _fewer_away:
                more_away = best.choices.weights_away
            best = found
    return best


def _is_near(found: Tried, best: Tried) -> bool:
    """Whether only the allocator's cleaning up, which comes and goes, may keep it from helping."""
    return found.cleans and found.seconds < NEARLY * best.seconds


def _likely(
    best: Tried, moves: Sequence[Move], later: Sequence[Climb], *, helps: bool
) -> list[Choices]:
    """What is tried from here on if the first move `helps` or not, and no other does."""
    likely = [moves[0](best.choices)]
    if helps:
        best = dataclasses.replace(best, choices=likely[0], cleans=False)
        likely += [move(best.choices) for move in moves[1:2]]
    return likely + [onward[0](best.choices) for climb in later if (onward := climb(best))]


def _smaller_loss(best: Tried) -> list[Move]:
    """With fewer rows of the loss at a time, for which the allocator finds room in one piece."""
    chunk = best.choices.loss_chunk
    less = [chunk // part for part in CHUNKS] if chunk and best.cleans else []
    return [_setting(loss_chunk=rows) for rows in less if rows]


def _more_room(gradients: int, best: Tried) -> list[Move]:
    """With more gradients that wait on the GPU."""
    if (room := best.choices.gradient_room) is None:
        return []
    more = [size for part in PARTS if (size := int(part * gradients)) > room]
    return [_setting(gradient_room=size) for size in more]


def _a_little_more_room(gradients: int, best: Tried) -> list[Move]:
    if (room := best.choices.gradient_room) is None:
        return []
    return [_setting(gradient_room=room + gradients // 16)]


def _fewer_away(best: Tried) -> list[Move]:
    """With weights of blocks on the GPU: those that forward needs first have the least time."""
    away = best.choices.weights_away
    fewer = [away[math.ceil(part * len(away)) :] for part in PARTS] if away else []
    return [_setting(weights_away=paths) for paths in fewer]


def _let_stay(first: float, best: Tried) -> list[Move]:
    """With state that stays on the GPU, an embedding's and a little more before all.

    Backward is done with that last and all at once: nothing would hide that its state comes.
    """
    least = first + PARTS[0] / 2
    shares = [round(least, 3), *(part for part in PARTS if part >= least + PARTS[0] / 2)]
    return [_setting(gpu_share=share) for share in shares if share < 1]


def _let_first_stay(first: float, best: Tried) -> list[Move]:
    """With the embedding's alone, if there is no room for more."""
    alone = math.ceil(first * 1000) / 1000
    return [_setting(gpu_share=alone)] if alone < 1 and not best.choices.gpu_share else []


def _come_early(best: Tried) -> list[Move]:
    """With as much state before the norm of all gradients as makes it faster."""
    if best.choices.gradient_room is None:
        return []
    counts = [times * best.choices.state_ahead for times in EARLY]
    more = [count for count in counts if count > best.choices.state_early]
    return [_setting(state_early=count) for count in more]


def _share(best: Tried) -> list[Move]:
    """With more steps that the host's cores make, of what is there."""
    return [_setting(host_share=share) for share in SHARES if _is_there(share, best)]


def _share_between(by: float, best: Tried) -> list[Move]:
    if not best.choices.host_share and by != SHARES_BETWEEN[0]:
        return []  # so little is worth nothing
    share = round(best.choices.host_share + by, 2)
    return [_setting(host_share=share)] if share > 0 and _is_there(share, best) else []


def _is_there(share: float, best: Tried) -> bool:
    return share + best.choices.gpu_share <= 1


def _come_early_beside_a_share(best: Tried) -> list[Move]:
    """What the host steps leaves room on the GPU."""
    return _come_early(best) if best.choices.host_share else []


def _setting(**fields: object) -> Move:
    return lambda choices: dataclasses.replace(choices, **fields)  # type: ignore[arg-type]
