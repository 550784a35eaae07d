"""Attention whose bias has gaps in its rows, such as T5's of relative positions: close the gaps.

Such a bias is looked up by query, key and head, and turned to head, query and key: what lies beside
each other in a row is then far apart in memory. No fused kernel takes that, so PyTorch takes
attention apart, in fp32 and with all its scores. A copy without gaps costs little beside it, and
the memory-efficient kernel takes that, the bias's gradient included.

The function that models call is replaced for the whole process while a plan needs it: recomputation
and evaluation run it as well, from threads of their own. Calls without gaps go through as they are.
A rehearsal asks for itself alone.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from oomph.jobs.job import Job
from oomph.plans.fidelity import Fidelity, of_fused_kernels
from oomph.plans.techniques import Settings, register
from oomph.process.rehearsal_threads import between_rehearsals, rehearsing, replaced_here
from oomph.techniques.technique import (
    ApplyContext,
    Inspection,
    SearchContext,
    Technique,
    Tried,
    Undo,
)

_NAME = "scaled_dot_product_attention"
_OURS = "_oomph_closes_gaps"


@dataclass(frozen=True, kw_only=True)
class AttentionRowsSettings(Settings):
    """How biases of attention lie in memory."""

    enabled: bool = False
    """Whether attention gets its biases in rows without gaps, which fused kernels take."""


@register
class AttentionRows(Technique[AttentionRowsSettings]):
    """Attention gets its biases in rows without gaps."""

    name = "attention_rows"
    title = "attention's bias"
    words = ("as it is", "in rows, for fused kernels")
    settings = AttentionRowsSettings
    tried = Tried.ALWAYS
    runs_in_foreign_loops = True

    def elsewhere(self, settings: AttentionRowsSettings) -> str:
        return "biases of attention in rows, which fused kernels take"

    def fidelity(self, settings: AttentionRowsSettings, precision: str) -> Fidelity:
        return of_fused_kernels(precision)

    def inspect(self, job: Job) -> Inspection:
        return _Gaps()

    def why_not(self, context: SearchContext) -> str:
        return "the CPU's kernels take gaps" if context.gpu is None else ""

    def apply(self, settings: AttentionRowsSettings, context: ApplyContext) -> Undo:
        return close_gaps()

    def around_rehearsal(self) -> AbstractContextManager[None]:
        return gaps_left()

    def process_state(self) -> Hashable:
        return closes_gaps()


class _Gaps(Inspection):
    """Whether attention is given a bias with gaps."""

    def __init__(self) -> None:
        self._seen = False

    @property
    def why_not(self) -> str:
        return "" if self._seen else "attention is given no bias with gaps in its rows"

    def rehearsing(self) -> AbstractContextManager[None]:
        return gaps_noticed(self._notice)

    def _notice(self) -> None:
        self._seen = True


#: Who asked for it in this process, outside of any rehearsal.
_users: set[object] = set()


class _Rehearsed(threading.local):
    #: Who asked for it in this thread's rehearsal; None where there is none.
    users: set[object] | None = None


_rehearsed = _Rehearsed()


def close_gaps() -> Undo:
    """From now on attention gets masks and biases without gaps, until the last user's undo."""
    user, rehearsed = object(), _rehearsed.users
    if rehearsed is not None:
        rehearsed.add(user)
        return lambda: rehearsed.discard(user)
    with between_rehearsals():
        _users.add(user)
        if not hasattr(getattr(F, _NAME), _OURS):
            setattr(F, _NAME, _closing_gaps(getattr(F, _NAME)))
    ours = getattr(F, _NAME)

    def undo() -> None:
        with between_rehearsals():
            _users.discard(user)
            # Where somebody replaced it since, theirs calls ours, which does no harm.
            if not _users and getattr(F, _NAME) is ours:
                setattr(F, _NAME, ours.__wrapped__)

    return undo


def closes_gaps() -> bool:
    """Whether gaps are closed now."""
    return bool(_users if _rehearsed.users is None else _rehearsed.users)


@contextlib.contextmanager
def gaps_left() -> Iterator[None]:
    """While active, a rehearsal closes the gaps that are closed inside, and no others."""
    with rehearsing():
        plain, before = _plain(), _rehearsed.users
        users = _rehearsed.users = set()
        closing = _closing_gaps(plain)

        def attend(*args: Any, **kwargs: Any) -> Tensor:
            return (closing if users else plain)(*args, **kwargs)

        try:
            with replaced_here(F, _NAME, attend):
                yield
        finally:
            _rehearsed.users = before


@contextlib.contextmanager
def gaps_noticed(notice: Callable[[], None]) -> Iterator[None]:
    """While active, `notice` is called whenever a rehearsal gives attention a mask with gaps."""
    with rehearsing():
        plain = _plain()

        def attend(*args: Any, **kwargs: Any) -> Tensor:
            if has_gaps(_mask_of(args, kwargs)):
                notice()
            return plain(*args, **kwargs)

        with replaced_here(F, _NAME, attend):
            yield


def _plain() -> Callable[..., Tensor]:
    """Attention as it is without those who asked for no gaps."""
    now = getattr(F, _NAME)
    return now.__wrapped__ if hasattr(now, _OURS) else now  # type: ignore[no-any-return]


def has_gaps(mask: Tensor | None) -> bool:
    """Whether other numbers lie between those of a row; one number that is repeated has no gaps."""
    return mask is not None and mask.dim() > 0 and mask.shape[-1] > 1 and mask.stride(-1) > 1


def _closing_gaps(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(theirs)
    def attend(*args: Any, **kwargs: Any) -> Tensor:
        mask = _mask_of(args, kwargs)
        if mask is None or not has_gaps(mask):
            return theirs(*args, **kwargs)
        if len(args) > 3:
            return theirs(*args[:3], _without_gaps(mask), *args[4:], **kwargs)
        return theirs(*args, **{**kwargs, "attn_mask": _without_gaps(mask)})

    setattr(attend, _OURS, True)
    return attend


def _mask_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    return args[3] if len(args) > 3 else kwargs.get("attn_mask")


def _without_gaps(mask: Tensor) -> Tensor:
    """A copy, in which what is repeated along a dimension is there but once."""
    once = mask
    for at, stride in enumerate(mask.stride()):
        if stride == 0:
            once = once.narrow(at, 0, 1)
    return once.contiguous().expand(mask.shape)
