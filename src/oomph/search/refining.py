"""Tuning of plans that offload the optimizer: choices that are rehearsed rather than predicted.

These choices decide which copies of a step overlap: how many gradients wait on the GPU for the
global norm, how many blocks keep their weights there, how much state stays there, how much of the
state is prefetched before the norm is known, and what share of the steps the host's cores make. The
rows of the loss decide whether the allocator finds room between the pieces. Only a rehearsal of the
whole step shows the result, so each choice is moved for as long as that makes the step faster.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oomph.plans.choices import Choices

#: Gradients that wait on the GPU, and blocks that stay there, as shares of all of them.
PARTS = tuple(part / 8 for part in range(1, 9))
#: Shares of the step tried for the host's cores, and smaller changes tried after that.
SHARES = (0.2, 0.4, 0.6, 0.8)
SHARES_BETWEEN = (0.1, -0.1)
#: State buckets fetched before all gradients are known, as multiples of those fetched ahead.
EARLY = tuple(range(2, 9))
#: Divisors of the planned rows of the loss.
CHUNKS = (2, 4)
#: How much faster a step must get for the next move to be tried.
WORTH_IT = 0.995
#: How much slower a first share for the host may be for the next to be tried all the same.
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


#: Tries choices; may change the blocks to make room for them, and returns None if it cannot.
Attempt = Callable[[Choices], Tried | None]
#: Announces what is likely to be tried, in this order.
Foresee = Callable[[Sequence[Choices]], None]
Move = Callable[[Choices], Choices]
#: Lists moves from the best choices so far, each to be made on top of the one before.
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
    """Return the fastest plan found; `gradients` is the bytes of all gradients.

    `first` is the share of all parameters in the optimizer's first tensor. `host_steps` says
    whether the speed of the host's cores is known.
    """
    # Usually the first of these moves helps, and the later ones do not.
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
        # Last, since the host's speed under load is the least certain.
        between = [functools.partial(_share_between, by) for by in SHARES_BETWEEN]
        climbs += [_share, *between, _come_early_beside_a_share]
    climbs.append(_smaller_loss)
    more_away = best.choices.weights_away
    for at, climb in enumerate(climbs):
        # Continue as long as the next move is faster.
        moves = climb(best)
        for done, move in enumerate(moves):
            if done and climb is _smaller_loss and not best.cleans:
                break
            # The move is made for this case, or usually helps; or its predecessor helped, so more
            # may help.
            once = (climb is _smaller_loss and best.cleans) or (climb in mostly_once and not done)
            helps = once or (done > 0 and climb not in (*mostly_once, _share))
            coming = moves[done : done + 1] if once else moves[done:]
            foresee(_likely(best, coming, climbs[at + 1 :], helps=helps))
            found = attempt(move(best.choices))
            if found is None and climb is _share and more_away != best.choices.weights_away:
                # The last weights that stayed on the GPU may have taken the room for it.
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
    """Whether only the allocator's cleaning up, which comes and goes, may spoil the gain."""
    return found.cleans and found.seconds < NEARLY * best.seconds


def _likely(
    best: Tried, moves: Sequence[Move], later: Sequence[Climb], *, helps: bool
) -> list[Choices]:
    """Choices tried next if the first move `helps` or not, and no other does."""
    likely = [moves[0](best.choices)]
    if helps:
        best = dataclasses.replace(best, choices=likely[0], cleans=False)
        likely += [move(best.choices) for move in moves[1:2]]
    return likely + [onward[0](best.choices) for climb in later if (onward := climb(best))]


def _smaller_loss(best: Tried) -> list[Move]:
    """Use fewer rows of the loss at a time: smaller pieces are easier to place."""
    chunk = best.choices.loss_chunk
    less = [chunk // part for part in CHUNKS] if chunk and best.cleans else []
    return [_setting(loss_chunk=rows) for rows in less if rows]


def _more_room(gradients: int, best: Tried) -> list[Move]:
    """Let more gradients wait on the GPU."""
    if (room := best.choices.gradient_room) is None:
        return []
    more = [size for part in PARTS if (size := int(part * gradients)) > room]
    return [_setting(gradient_room=size) for size in more]


def _a_little_more_room(gradients: int, best: Tried) -> list[Move]:
    if (room := best.choices.gradient_room) is None:
        return []
    return [_setting(gradient_room=room + gradients // 16)]


def _fewer_away(best: Tried) -> list[Move]:
    """Keep weights of blocks on the GPU, first of those that forward needs first."""
    away = best.choices.weights_away
    fewer = [away[math.ceil(part * len(away)) :] for part in PARTS] if away else []
    return [_setting(weights_away=paths) for paths in fewer]


def _let_stay(first: float, best: Tried) -> list[Move]:
    """Keep state on the GPU, first the embedding's and a little more.

    Backward finishes the embedding last and all at once: nothing would hide the copy of its state.
    """
    least = first + PARTS[0] / 2
    shares = [round(least, 3), *(part for part in PARTS if part >= least + PARTS[0] / 2)]
    return [_setting(gpu_share=share) for share in shares if share < 1]


def _let_first_stay(first: float, best: Tried) -> list[Move]:
    """Keep only the embedding's state, if there is no room for more."""
    alone = math.ceil(first * 1000) / 1000
    return [_setting(gpu_share=alone)] if alone < 1 and not best.choices.gpu_share else []


def _come_early(best: Tried) -> list[Move]:
    """Fetch more state before the global norm is known, as long as that is faster."""
    if best.choices.gradient_room is None:
        return []
    counts = [times * best.choices.state_ahead for times in EARLY]
    more = [count for count in counts if count > best.choices.state_early]
    return [_setting(state_early=count) for count in more]


def _share(best: Tried) -> list[Move]:
    """Let the host's cores make more of the steps, up to what is available."""
    return [_setting(host_share=share) for share in SHARES if _is_there(share, best)]


def _share_between(by: float, best: Tried) -> list[Move]:
    if not best.choices.host_share and by != SHARES_BETWEEN[0]:
        return []  # such a small share is not worth it
    share = round(best.choices.host_share + by, 2)
    return [_setting(host_share=share)] if share > 0 and _is_there(share, best) else []


def _is_there(share: float, best: Tried) -> bool:
    return share + best.choices.gpu_share <= 1


def _come_early_beside_a_share(best: Tried) -> list[Move]:
    """With a host share, which leaves room on the GPU, fetch more state early."""
    return _come_early(best) if best.choices.host_share else []


def _setting(**fields: object) -> Move:
    return lambda choices: dataclasses.replace(choices, **fields)  # type: ignore[arg-type]
