"""Attention whose bias has gaps in its rows, such as T5's of relative positions: close the gaps.

Such a bias is looked up by query, key and head, and turned to head, query and key: what lies beside
each other in a row is then far apart in memory. No fused kernel takes that, so PyTorch takes
attention apart, in fp32 and with all its scores. A copy without gaps costs little beside it, and
the memory-efficient kernel takes that, the bias's gradient included.

The function that models call is replaced for the whole process while a plan needs it: recomputation
and evaluation run it as well, from threads of their own. Calls without gaps go through as they are.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor
from torch.nn import functional as F

from oomph.techniques.technique import Undo

_NAME = "scaled_dot_product_attention"
_USERS = "_oomph_users"
_lock = threading.Lock()


def close_gaps() -> Undo:
    """From now on attention gets masks and biases without gaps, until the last user's undo."""
    user = object()
    with _lock:
        if not closes_gaps():
            setattr(F, _NAME, _closing_gaps(getattr(F, _NAME)))
        ours = getattr(F, _NAME)
        users: set[object] = getattr(ours, _USERS)
        users.add(user)

    def undo() -> None:
        with _lock:
            users.discard(user)
            # Where somebody replaced it since, theirs calls ours, which does no harm.
            if not users and getattr(F, _NAME) is ours:
                setattr(F, _NAME, ours.__wrapped__)

    return undo


def closes_gaps() -> bool:
    """Whether gaps are closed now."""
    return hasattr(getattr(F, _NAME), _USERS)


@contextlib.contextmanager
def gaps_left() -> Iterator[None]:
    """While active no gap is closed for those who asked before; what is asked inside, ends here."""
    now = getattr(F, _NAME)
    with mock.patch.object(F, _NAME, now.__wrapped__ if closes_gaps() else now):
        yield


@contextlib.contextmanager
def gaps_noticed(notice: Callable[[], None]) -> Iterator[None]:
    """While active, `notice` is called whenever attention is given a mask with gaps."""
    plain = getattr(F, _NAME)

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        if has_gaps(_mask_of(args, kwargs)):
            notice()
        return plain(*args, **kwargs)  # type: ignore[no-any-return]

    with mock.patch.object(F, _NAME, attend):
        yield


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

    setattr(attend, _USERS, set())
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
