"""A cell of the matrix: a training run with a technique, held against the untouched one."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from ways.training import Training, Way

from benchmarks.courses import Course, first_difference, train_untouched, train_with
from oomph.runs.run import Run

#: By a number's type: how far apart sums in another order may be.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.complex128: 1e-9}


def started(make: Callable[[], Training]) -> Training:
    """A training as it is before the first step."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    training = make()
    training.model.train()
    return training


def make(way: Way) -> Training:
    """That of a way."""
    return started(way.make)


@functools.cache
def untouched(way: Way, part: int | None = None) -> Course:
    """The training as its user wrote it; in parts of so many samples where those draw otherwise."""
    course = train_untouched(make(way), part)
    for taken in course.snapshots:
        finite = taken["loss"].isfinite()
        assert finite, f"{way.name} trains to {taken['loss']}: it would hide what is wrong"
    return course


def alike(one: Tensor, other: Tensor) -> str:
    """How two tensors differ by more than the order of sums explains, in words; else nothing."""
    tolerance = _TOLERANCE.get(other.dtype, 0.0)
    if torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True):
        return ""
    return f" is {(one - other).abs().max():.3g} apart, of {other.abs().max():.3g}"


def check(way: Way, names: Sequence[str], start: Callable[[Training], Run]) -> None:
    """Equal, or refused for a reason that is expected with nothing changed; all else fails."""
    course = train_with(make(way), start)
    expected = untouched(way, course.part if way.draws else None)
    if course.refusal is not None:
        reasons = [way.refusals[name] for name in names if name in way.refusals]
        said = str(course.refusal)
        assert any(re.search(reason, said) for reason in reasons), f"refused: {said}"
    assert not (found := first_difference(course, expected, alike)), found
