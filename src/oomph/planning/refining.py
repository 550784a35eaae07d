"""What is tried rather than heard, where the optimizer left the GPU: who waits where, who steps.

What share of the steps the host's cores make, how many gradients wait on the GPU for the norm of
all, and how many blocks have their weights there, decides which copies meet in a step. Only a
rehearsal of the whole step knows what that comes to, so each is raised for as long as it makes the
step faster.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from oomph.planning.choices import Choices

#: Gradients that wait on the GPU, and blocks that stay there, as parts of all of them.
PARTS = tuple(part / 8 for part in range(1, 9))
#: What the host's cores may have to step.
SHARES = tuple(part / 10 for part in range(1, 10))
#: How much faster a step must get for the next one to be tried.
WORTH_IT = 0.99

#: Seconds of a step by these choices; None where it does not fit.
Attempt = Callable[[Choices], float | None]


def refine(
    choices: Choices, seconds: float, attempt: Attempt, *, gradients: int, host_steps: bool
) -> Choices:
    """The fastest that was found; `gradients` are the bytes of all.

    `host_steps` says that it is known how fast the host's cores step.
    """
    if (room := choices.gradient_room) is not None:
        more = [size for part in PARTS if (size := int(part * gradients)) > room]
        rooms = [dataclasses.replace(choices, gradient_room=size) for size in more]
        choices, seconds = _climb(choices, seconds, rooms, attempt)
        room = (choices.gradient_room or 0) + gradients // 16
        between = dataclasses.replace(choices, gradient_room=room)
        choices, seconds = _climb(choices, seconds, [between], attempt)
    if away := choices.weights_away:
        # Those that forward needs first have the least time to come.
        fewer = [dataclasses.replace(choices, weights_away=away[_some(away, p) :]) for p in PARTS]
        choices, seconds = _climb(choices, seconds, fewer, attempt)
    if host_steps:
        # Last: how fast the host is beside all else is what is known least.
        shares = [dataclasses.replace(choices, host_share=share) for share in SHARES]
        choices, _ = _climb(choices, seconds, shares, attempt)
    return choices


def _some(paths: Sequence[str], part: float) -> int:
    return math.ceil(part * len(paths))


def _climb(
    choices: Choices, seconds: float, following: Iterable[Choices], attempt: Attempt
) -> tuple[Choices, float]:
    """Go on for as long as the next is faster."""
    for tried in following:
        found = attempt(tried)
        if found is None or found > WORTH_IT * seconds:
            break
        choices, seconds = tried, found
    return choices, seconds
