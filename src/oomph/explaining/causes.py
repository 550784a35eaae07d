"""Finds why memory ran out: each possible cause is weighed in bytes, and the largest wins.

A cause counts only if it is sufficient: without its bytes the failed request would have succeeded.
All of this is arithmetic on recorded numbers; no tensor is touched.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from oomph.explaining.alive import KEPT, UNSEEN, Alive, Held
from oomph.explaining.failure import Failure, Phase
from oomph.explaining.logbook import Inputs, Note
from oomph.explaining.meters import Reading
from oomph.rehearsal.timeline import Category
from oomph.units import format_bytes

#: Anything below these shares of the limit is too small to be the cause.
NOTABLE = 0.05
NOTABLE_UNUSED = 0.1
#: The share of steps after which memory must have risen to count as growing.
MOSTLY = 0.75
LEAST_NOTES = 3
MANY_CALLS = 6
#: How much larger than all earlier batches one must be to count as longer.
LONGER = 1.05


class CauseKind(StrEnum):
    """The kinds of causes."""

    DOES_NOT_FIT = "does_not_fit"
    LEAK = "leak"
    LONGER_BATCH = "longer_batch"
    FRAGMENTATION = "fragmentation"
    HELD_BY_OTHERS = "held_by_others"
    EVAL_ACCUMULATION = "eval_accumulation"
    SAVE_COPY = "save_copy"
    OPTIMIZER_FIRST_STEP = "optimizer_first_step"
    LARGE_LOGITS = "large_logits"


#: Without fragmentation one more request would succeed; growth or a long batch would go on.
_WEIGHTS = {CauseKind.FRAGMENTATION: 0.5}


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One cause, and the bytes that it explains."""

    kind: CauseKind
    size: int
    sentence: str

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {"kind": str(self.kind), "size": self.size, "sentence": self.sentence}


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything known about a program that ran out of memory."""

    asked: int
    """Bytes of the failed request; 0 if unknown."""
    reading: Reading
    failure: Failure
    steps: int
    """Optimizer steps completed before."""
    notes: tuple[Note, ...]
    eval_notes: tuple[Note, ...]
    call_notes: tuple[Note, ...]
    """Before the training calls since the last optimizer step."""
    most_calls: int
    """Most training calls in a completed step."""
    inputs: Inputs
    largest_before: Inputs
    alive: Alive

    @property
    def missing(self) -> int:
        """How many more bytes would have been enough for this request."""
        return max(self.asked - self.reading.room, 1)

    @property
    def activations(self) -> int:
        """Bytes that shrink with the batch, including the failed request."""
        sizes = self.alive.categories
        return sum(sizes.get(name, 0) for name in (Category.ACTIVATION, KEPT, UNSEEN)) + self.asked


def find_causes(evidence: Evidence) -> tuple[Cause, ...]:
    """The causes that are each sufficient, the largest first; "does not fit" comes last."""
    rules = (_others, _fragmentation, _leak, _longer, _eval, _save, _optimizer, _logits)
    found = [cause for rule in rules for cause in rule(evidence)]
    found.sort(key=lambda cause: -cause.size * _WEIGHTS.get(cause.kind, 1.0))
    return (*found, _does_not_fit(evidence))


def growth(notes: Sequence[Note]) -> int:
    """Bytes by which memory grew, if it did so in most steps; else 0."""
    if len(notes) < LEAST_NOTES:
        return 0
    steps = [after.allocated - before.allocated for before, after in itertools.pairwise(notes)]
    rising = sum(step > 0 for step in steps) >= MOSTLY * len(steps)
    return max(notes[-1].allocated - notes[0].allocated, 0) if rising else 0


def after_warm_up(notes: Sequence[Note]) -> Sequence[Note]:
    """Notes from the first step with optimizer state on."""
    return [note for note in notes if note.step > 1] or notes


def predicted_need(evidence: Evidence) -> int:
    """What a step with the current inputs would allocate, in proportion to the largest before."""
    last = evidence.notes[-1]
    per_element = (last.peak - last.allocated) / max(evidence.largest_before.elements, 1)
    return int(last.allocated + per_element * evidence.inputs.elements)


# --- rules ----------------------------------------------------------------------------------------


def _others(evidence: Evidence) -> Iterator[Cause]:
    reading = evidence.reading
    allowed = reading.limit - reading.reserved >= evidence.asked
    if not allowed or reading.others < max(evidence.missing, NOTABLE * reading.total):
        return
    yield Cause(
        kind=CauseKind.HELD_BY_OTHERS,
        size=reading.others,
        sentence=(
            f"{format_bytes(reading.others)} of the device's {format_bytes(reading.total)} are held"
            " by someone else: another process, or a library beside PyTorch's allocator"
        ),
    )


def _fragmentation(evidence: Evidence) -> Iterator[Cause]:
    reading = evidence.reading
    if not evidence.asked or reading.unused < evidence.asked:
        return
    if reading.unused < NOTABLE_UNUSED * reading.limit:
        return
    yield Cause(
        kind=CauseKind.FRAGMENTATION,
        size=reading.unused,
        sentence=(
            f"memory is fragmented: {format_bytes(reading.unused)} of"
            f" {format_bytes(reading.reserved)} reserved are in no use, but not in one piece of"
            f" the {format_bytes(evidence.asked)} asked for"
        ),
    )


def _leak(evidence: Evidence) -> Iterator[Cause]:
    notes, what = after_warm_up(evidence.notes), "step"
    calls = evidence.call_notes
    # Growth over the calls of a step is its activations, unless there are more calls than ever.
    if len(calls) > max(evidence.most_calls, MANY_CALLS) and growth(calls) > growth(notes):
        notes, what = calls, "forward"
    grown = growth(notes)
    if grown < max(NOTABLE * evidence.reading.limit, 1):
        return
    count = notes[-1].step - notes[0].step
    sentence = f"memory grew from {what} to {what}, by {format_bytes(grown)} over {count:,} {what}s"
    holder = main_holder(evidence)
    if holder is not None:
        sentence += f": {describe_holder(holder)}"
    yield Cause(kind=CauseKind.LEAK, size=grown, sentence=sentence)


def _longer(evidence: Evidence) -> Iterator[Cause]:
    now, before = evidence.inputs, evidence.largest_before
    in_step = evidence.failure.phase in (Phase.FORWARD, Phase.BACKWARD)
    if not in_step or not evidence.notes or not before.elements:
        return
    if now.elements < LONGER * before.elements:
        return
    last = evidence.notes[-1]
    yield Cause(
        kind=CauseKind.LONGER_BATCH,
        size=max(predicted_need(evidence) - last.peak, 1),
        sentence=(
            f"this batch is larger than any before: {shape_words(now)}, after at most"
            f" {shape_words(before)} in {evidence.steps:,} steps; it would need"
            f" {format_bytes(predicted_need(evidence))} (predicted from the steps before)"
        ),
    )


def _eval(evidence: Evidence) -> Iterator[Cause]:
    if evidence.failure.phase is not Phase.EVAL:
        return
    grown = growth(evidence.eval_notes)
    if grown < NOTABLE * evidence.reading.limit:
        return
    calls = evidence.eval_notes[-1].step - evidence.eval_notes[0].step
    sentence = (
        f"evaluation keeps its outputs on the device: {format_bytes(grown)} more after"
        f" {calls:,} batches"
    )
    holder = main_holder(evidence)
    if holder is not None:
        sentence += f", {describe_holder(holder)}"
    yield Cause(kind=CauseKind.EVAL_ACCUMULATION, size=grown, sentence=sentence)


def _save(evidence: Evidence) -> Iterator[Cause]:
    copies = evidence.alive.weight_copies
    in_save = evidence.failure.phase is Phase.SAVE
    if in_save:
        # An unfinished copy is already gone when the error is handled; nothing else runs in a save.
        copies += evidence.alive.categories.get(UNSEEN, 0)
    # A copy made in the training loop itself has no known name; it is recognized by its sizes.
    outside = evidence.failure.phase in (Phase.BETWEEN, Phase.EVAL)
    looks_so = outside and evidence.alive.asks_for_weight
    if not in_save and not (looks_so and copies >= NOTABLE * evidence.reading.limit):
        return
    yield Cause(
        kind=CauseKind.SAVE_COPY,
        size=copies + evidence.asked,
        sentence=(
            "saving copies the weights on the device: the copy held"
            f" {format_bytes(copies)} when {format_bytes(evidence.asked)} more were asked for"
        ),
    )


def _optimizer(evidence: Evidence) -> Iterator[Cause]:
    failure = evidence.failure
    if failure.phase is not Phase.OPTIMIZER or not failure.first_optimizer_step:
        return
    state = evidence.alive.expected_state
    yield Cause(
        kind=CauseKind.OPTIMIZER_FIRST_STEP,
        size=state,
        sentence=(
            "the optimizer makes its state in its first step: forward and backward fit, and"
            f" {format_bytes(state)} of state (predicted) come on top from then on"
        ),
    )


def _logits(evidence: Evidence) -> Iterator[Cause]:
    if evidence.failure.phase not in (Phase.FORWARD, Phase.BACKWARD, Phase.EVAL) or evidence.steps:
        return
    size = logits_size(evidence)
    if size < evidence.missing or 2 * size < evidence.activations:
        return
    widest = evidence.alive.vocabularies[-1]
    yield Cause(
        kind=CauseKind.LARGE_LOGITS,
        size=size,
        sentence=(
            f"scores over a vocabulary of {widest:,} take {format_bytes(size)}, of"
            f" {format_bytes(evidence.activations)} that the batch takes in all"
        ),
    )


def _does_not_fit(evidence: Evidence) -> Cause:
    sizes = evidence.alive.categories
    largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in list(sizes.items())[:3])
    when = f"after {evidence.steps:,} steps" if evidence.steps else "in the first step"
    if evidence.failure.phase is Phase.BUILD:
        when = "before the first step"
    return Cause(
        kind=CauseKind.DOES_NOT_FIT,
        size=evidence.missing,
        sentence=(
            f"it does not fit: {when}, {format_bytes(evidence.asked)} were asked for with"
            f" {format_bytes(evidence.reading.room)} left of {format_bytes(evidence.reading.limit)}"
            + (f"; alive were {largest}" if largest else "")
        ),
    )


# --- words ----------------------------------------------------------------------------------------


def logits_size(evidence: Evidence) -> int:
    """Bytes of scores over the vocabulary, including the failed request if it is for scores."""
    alive, asked = evidence.alive, evidence.asked
    # A request has no shape; one for scores is a whole number of rows, and many of them.
    rows = {asked // width for width in alive.vocabularies if asked and asked % width == 0}
    is_one = any(count >= 2 * min(evidence.inputs.elements, 16) for count in rows)
    return alive.logits + (asked if is_one else 0)


def main_holder(evidence: Evidence) -> Held | None:
    """The holder that keeps most, if that is a notable share of the limit."""
    held = evidence.alive.held
    if not held:
        return None
    return held[0] if held[0].size >= NOTABLE * evidence.reading.limit else None


def describe_holder(held: Held) -> str:
    """`the list outputs, filled in train.py:41, keeps 1.2 GiB in 64 tensors like float32 …`."""
    where = f", filled in {held.place}," if held.place else ""
    kind = "variable" if held.kind == "tensor" else held.kind
    tensors = f"{held.count:,} tensors like" if held.count > 1 else "one tensor,"
    return (
        f"the {kind} {held.name}{where} keeps {format_bytes(held.size)} with {tensors} {held.what}"
    )


def shape_words(inputs: Inputs) -> str:
    """`8×2048`."""
    return "×".join(map(str, inputs.shape)) or "nothing"
