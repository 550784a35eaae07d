"""The exact techniques of the matrix: what each chooses for a training, alone and in pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from switched_on import with_on
from ways.training import Training

from oomph.errors import BadInput
from oomph.plans.choices import KEEP, RECOMPUTE, Choices, is_offloaded, offloaded, saving

Choose = Callable[[Training, Choices], Choices]


def _set(**fields: Any) -> Choose:
    return lambda _, choices: dataclasses.replace(choices, **fields)


def _with_blocks(how: Callable[[str], str], **fields: Any) -> Choose:
    """Every block differently, by how it was so far."""

    def choose(training: Training, choices: Choices) -> Choices:
        so_far = {path: choices.blocks.get(path, KEEP) for path in training.blocks}
        blocks = {path: how(one) for path, one in so_far.items()}
        return dataclasses.replace(choices, blocks=blocks, **fields)

    return choose


def _recomputed(how: str) -> Callable[[str], str]:
    return lambda so_far: offloaded(how) if is_offloaded(so_far) else how


def _chunked(training: Training, choices: Choices) -> Choices:
    return dataclasses.replace(choices, head=training.head, loss_chunk=2)


def _away(place: str) -> Choose:
    def choose(training: Training, choices: Choices) -> Choices:
        away = {"weights_away": training.blocks, "weights_away_on": place}
        return dataclasses.replace(choices, optimizer_on="host", **away)

    return choose


#: What a technique adds to what was chosen so far.
TECHNIQUES: dict[str, Choose] = {
    "recompute": _with_blocks(_recomputed(RECOMPUTE)),
    "recompute_in_part": _with_blocks(_recomputed(saving(("product#0",)))),
    "micro_batch": _set(micro_batch=2),
    "one_by_one": _set(micro_batch=1),
    "chunked_loss": _chunked,
    "fused_optimizer": lambda _, choices: with_on(choices, "fused_optimizer"),
    "in_backward": _set(optimizer_in_backward=True),
    "host_optimizer": _set(optimizer_on="host"),
    "host_cores": _set(optimizer_on="host", host_share=1.0),
    "leaving_gradients": _set(optimizer_on="host", gradient_room=0),
    "disk_state": _set(optimizer_on="host", disk_share=1.0),
    "weights_away": _away("host"),
    "weights_on_disk": _away("disk"),
    "offload": _with_blocks(offloaded),
    "offload_to_disk": _with_blocks(offloaded, offloaded_to="disk"),
    "channels_last": lambda _, choices: with_on(choices, "channels_last"),
}
#: Those that are tried with each other: one of each kind.
PAIRED = (
    "recompute",
    "micro_batch",
    "chunked_loss",
    "in_backward",
    "leaving_gradients",
    "weights_away",
    "offload",
)
_NEEDS_BLOCKS = {"recompute", "recompute_in_part", "weights_away", "weights_on_disk", "offload"}
_NEEDS_BLOCKS |= {"offload_to_disk"}


def combinations(number: int) -> list[tuple[str, ...]]:
    """Every technique alone, and the pairs that the way with this number is tried with.

    Techniques stand in a circle, and a way has the pairs of one distance in it: each technique is
    in two of its pairs, and three ways that follow each other have all pairs there are.
    """
    alone = [(name,) for name in TECHNIQUES]
    count = len(PAIRED)
    distance = 1 + number % (count // 2)
    pairs = [sorted((at, (at + distance) % count)) for at in range(count)]
    return [*alone, *((PAIRED[one], PAIRED[other]) for one, other in pairs)]


def choose(names: tuple[str, ...], training: Training) -> Choices | None:
    """What these techniques do to a training; None where it has nothing for one of them, or where
    they exclude each other."""
    if _NEEDS_BLOCKS & set(names) and not training.blocks:
        return None
    if "chunked_loss" in names and not training.head:
        return None
    choices = Choices(blocks=dict.fromkeys(training.blocks, KEEP))
    try:
        for name in names:
            choices = TECHNIQUES[name](training, choices)
    except BadInput:
        return None
    return choices
