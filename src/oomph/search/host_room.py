"""Makes room in host memory: if a plan takes more than there is, some of it goes to disk.

The disk is much slower than the link to the host, so no more goes there than must: state, gradients
or what blocks save, or several of these, whichever is faster, and weights if that is not enough.
For each byte it frees, a step writes and reads one byte of state; of gradients and of what blocks
save, one for each micro-batch. Gradients come first, since the link out is free while backward
makes them. Weights are read once more. Other uses of host memory may no longer be worth what they
cost then. How much memory a share of the state frees is tried rather than calculated: whole
parameters are moved, through buffers that are in host memory themselves.
"""

from __future__ import annotations

import dataclasses
import math

from oomph.plans.choices import Choices
from oomph.search.refining import Attempt, Tried

#: Resolution of shares on disk: one part in this many.
PARTS = 100


def make_host_room(best: Tried, lighter: Choices, attempt: Attempt, host: int) -> Tried:
    """The fastest plan within `host` bytes, or the nearest to that if none fits.

    `lighter` are the choices of `best` with blocks that keep less on the host.
    """
    if best.host <= host:
        return best
    found = _with_disk(best, attempt, host)

    def try_instead(choices: Choices) -> None:
        nonlocal found
        start = attempt(dataclasses.replace(choices, disk_share=0.0))
        # With a share on disk it would be slower still.
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
    # The weights that forward needs first have the least time to arrive.
    for part in (2, 1):
        if away := found.choices.weights_away:
            fewer = away[math.ceil(len(away) / part) :]
            try_instead(dataclasses.replace(found.choices, weights_away=fewer))
    if found.choices.host_share:
        try_instead(dataclasses.replace(found.choices, host_share=0.0))
    for choices in (found.choices, lighter):
        if found.host > host and choices.weights_away:
            # State that the host's cores step must be in host memory.
            try_instead(dataclasses.replace(choices, weights_away_on="disk", host_share=0.0))
    return found


def _with_disk(start: Tried, attempt: Attempt, host: int) -> Tried:
    """The same with the smallest disk share that makes room, or with all of it if none does."""
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
        # If a change of share moves nothing, parameters are too large to interpolate: bisect.
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
