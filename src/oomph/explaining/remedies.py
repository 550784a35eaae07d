"""Remedies for each cause, with the bytes they are predicted to save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from oomph.explaining.causes import (
    Cause,
    CauseKind,
    Evidence,
    main_holder,
    shape_words,
)
from oomph.rehearsal.timeline import Category

#: 8-bit state takes a quarter of fp32 state, plus a scale for each block.
_LOW_BIT_PART = 0.26


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One command or setting, and its predicted effect."""

    do: str
    saves: int | None
    """Bytes, predicted from what was recorded; None if that is not possible."""
    enough: bool | None
    """Whether that is enough for the failed request."""
    why: str

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {"do": self.do, "saves": self.saves, "enough": self.enough, "why": self.why}


_Suggestion = tuple[str, int | None, str]


def find_remedies(cause: Cause, evidence: Evidence, next_command: str) -> tuple[Remedy, ...]:
    """Remedies for the cause, and the command to run next to see what would make it fit."""
    suggestions = [*_RULES[cause.kind](cause, evidence)]
    remedies = [
        Remedy(
            do=do,
            saves=saves,
            enough=None if saves is None else saves >= evidence.missing,
            why=why,
        )
        for do, saves, why in suggestions
    ]
    why = "finds what to recompute, split and chunk so that it fits, before anything runs"
    remedies.append(Remedy(do=next_command, saves=None, enough=None, why=why))
    return tuple(remedies)


def _against_leak(cause: Cause, evidence: Evidence) -> Iterator[_Suggestion]:
    holder = main_holder(evidence)
    name = holder.name if holder is not None else "what is kept from step to step"
    yield (
        f"store numbers in {name}: loss.item(), or output.detach().cpu()",
        cause.size,
        "a tensor with a graph keeps all its step's activations alive",
    )


def _against_longer(cause: Cause, evidence: Evidence) -> Iterator[_Suggestion]:
    now, before = evidence.inputs, evidence.largest_before
    yield (
        f"cut or bucket batches to {shape_words(before)}",
        cause.size,
        f"{shape_words(before)} ran; {shape_words(now)} did not",
    )
    yield from _smaller_batch(evidence)


def _against_fragmentation(cause: Cause, evidence: Evidence) -> Iterator[_Suggestion]:
    yield (
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        cause.size,
        "segments that grow leave no holes between them",
    )


def _against_others(cause: Cause, evidence: Evidence) -> Iterator[_Suggestion]:
    yield (
        "nvidia-smi",
        cause.size,
        "names the processes on the device; end those that should not be there, or plan for what"
        " is left",
    )


def _against_eval(cause: Cause, evidence: Evidence) -> Iterator[_Suggestion]:
    holder = main_holder(evidence)
    name = f"{holder.name}: " if holder is not None else ""
    yield (
        f"{name}move outputs to the host batch by batch: output.cpu()",
        cause.size,
        "in the Trainer of transformers that is eval_accumulation_steps=1",
    )


def _against_save(cause: Cause, evidence: Evidence) -> Iterator[_Suggestion]:
    yield (
        "save model.state_dict() as it is, or copy it with .cpu()",
        cause.size,
        "writing needs no second copy on the device",
    )


def _against_optimizer(cause: Cause, evidence: Evidence) -> Iterator[_Suggestion]:
    state = evidence.alive.expected_state
    yield (
        'oomph.fit(…, allow="lossy")',
        int(state * (1 - _LOW_BIT_PART)),
        "keeps the optimizer's state in 8 bits: lossy, so watch the loss",
    )
    yield "torch.optim.SGD(…, momentum=0.9)", state // 2, "keeps one number a weight, not two"


def _against_logits(cause: Cause, evidence: Evidence) -> Iterator[_Suggestion]:
    yield (
        "oomph.fit(…)",
        cause.size * 7 // 8,
        "computes the loss in parts, so that scores exist for an eighth of the tokens at a time",
    )
    yield from _smaller_batch(evidence)


def _against_size(cause: Cause, evidence: Evidence) -> Iterator[_Suggestion]:
    yield from _smaller_batch(evidence)
    saved = evidence.alive.categories.get(Category.ACTIVATION, 0)
    if saved:
        yield (
            "gradient checkpointing",
            saved // 2,
            "recomputes blocks in backward; at least half of what forward saved so far",
        )


def _smaller_batch(evidence: Evidence) -> Iterator[_Suggestion]:
    shape = evidence.inputs.shape
    if not shape or shape[0] < 2:
        return
    half = shape[0] // 2
    yield (
        f"micro-batches of {half} instead of {shape[0]}, gradients accumulated",
        int(evidence.activations * (1 - half / shape[0])),
        "what a batch takes shrinks with it; the global batch stays",
    )


_RULES: dict[CauseKind, Callable[[Cause, Evidence], Iterator[_Suggestion]]] = {
    CauseKind.LEAK: _against_leak,
    CauseKind.LONGER_BATCH: _against_longer,
    CauseKind.FRAGMENTATION: _against_fragmentation,
    CauseKind.HELD_BY_OTHERS: _against_others,
    CauseKind.EVAL_ACCUMULATION: _against_eval,
    CauseKind.SAVE_COPY: _against_save,
    CauseKind.OPTIMIZER_FIRST_STEP: _against_optimizer,
    CauseKind.LARGE_LOGITS: _against_logits,
    CauseKind.DOES_NOT_FIT: _against_size,
}
