"""Room in host memory, where a plan takes more of it than there is: state goes on to the disk.

The disk is much slower than the link to the host, so no more goes there than must. How much memory
a share frees is tried rather than calculated: whole parameters go, through buffers that are in host
memory themselves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from oomph.planning.choices import Choices
from oomph.planning.refining import Attempt, Tried

#: Shares of the disk are told apart by one part in so many.
PARTS = 100


def make_host_room(best: Tried, lighter: Iterable[Choices], attempt: Attempt, host: int) -> Tried:
    """The fastest that takes no more than `host` bytes; where none does, the one nearest to that.

    `lighter` are other choices that may take less host memory than `best` does.
    """
    if best.host <= host:
        return best
    found = _with_disk(best, attempt, host)
    for choices in lighter:
        start = attempt(choices)
        # With a share on the disk it would be slower still.
        if start is not None and (found.host > host or start.seconds < found.seconds):
            other = _with_disk(start, attempt, host)
            found = min(found, other, key=lambda one: (max(one.host - host, 0), one.seconds))
    return found


def _with_disk(start: Tried, attempt: Attempt, host: int) -> Tried:
    """The same with the smallest share on the disk that makes room; with all, if that does not."""
    if start.host <= host:
        return start
    most = round(PARTS * (1 - start.choices.host_share))
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
