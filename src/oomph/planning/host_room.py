"""Room in host memory, where a plan takes more of it than there is: some goes on to the disk.

The disk is much slower than the link to the host, so no more goes there than must: state,
gradients, what blocks save, or several of them, whichever is faster, and weights where that is not
enough. For each byte that it frees, a step writes and reads one of state; of gradients and of what
blocks save one for each micro-batch, first of gradients, whose way out is free while backward makes
them; and reads weights once more. What else takes host memory may be worth less than it costs now.
How much memory a share of the state frees is tried rather than calculated: whole parameters go,
through buffers that are in host memory themselves.
"""

from __future__ import annotations

import dataclasses
import math

from oomph.planning.choices import Choices
from oomph.planning.refining import Attempt, Tried

#: Shares of the disk are told apart by one part in so many.
PARTS = 100


def make_host_room(best: Tried, lighter: Choices, attempt: Attempt, host: int) -> Tried:
    """The fastest that takes no more than `host` bytes; where none does, the one nearest to that.

    `lighter` are the choices of `best` with blocks that have the host keep less.
    """
    if best.host <= host:
        return best
    found = _with_disk(best, attempt, host)

    def try_instead(choices: Choices) -> None:
        nonlocal found
        start = attempt(dataclasses.replace(choices, disk_share=0.0))
        # With a share on the disk it would be slower still.
        if start is not None and (found.host > host or start.seconds < found.seconds):
            other = _with_disk(start, attempt, host)
            found = min(found, other, key=lambda one: (max(one.host - host, 0), one.seconds))

    if lighter != best.choices:
        try_instead(lighter)
    for choices in (lighter, found.choices):
        if choices.gradient_room is not None:
            try_instead(dataclasses.replace(choices, gradients_on="disk"))
    for choices in (lighter, found.choices):
        if choices.offloaded:
            try_instead(dataclasses.replace(choices, offloaded_to="disk"))
    # Those that forward needs first have the least time to come.
    for part in (2, 1):
        if away := found.choices.weights_away:
            fewer = away[math.ceil(len(away) / part) :]
            try_instead(dataclasses.replace(found.choices, weights_away=fewer))
    if found.choices.host_share:
        try_instead(dataclasses.replace(found.choices, host_share=0.0))
    for choices in (found.choices, lighter):
        if found.host > host and choices.weights_away:
            # What the host's cores step is in its memory.
            try_instead(dataclasses.replace(choices, weights_away_on="disk", host_share=0.0))
    return found


def _with_disk(start: Tried, attempt: Attempt, host: int) -> Tried:
    """The same with the smallest share on the disk that makes room; with all, if that does not."""
    if start.host <= host:
        return start
    most = math.floor(PARTS * (1 - start.choices.host_share - start.choices.gpu_share) + 1e-6)
    least, too_much = 0, start.host
    fits = attempt(_on_disk(start.choices, most)) if most else None
    if fits is None or fits.host > host:
        return min(filter(None, (start, fits)), key=lambda one: one.host)
    as_before = False
    while (gap := most - least) > 1:
        missing = (too_much - host) / (too_much - fits.host)
        # Where a share more or less moves nothing, parameters are too large to tell how many must.
        ahead = gap // 2 if as_before else math.ceil(missing * gap)
        share = least + min(max(ahead, 1), gap - 1)
        tried = attempt(_on_disk(start.choices, share))
        as_before = tried is None or tried.host in (too_much, fits.host)
        if tried is not None and tried.host <= host:
            most, fits = share, tried
        else:
            least, too_much = share, tried.host if tried is not None else too_much
    return fits


def _on_disk(choices: Choices, parts: int) -> Choices:
    return dataclasses.replace(choices, disk_share=parts / PARTS)
