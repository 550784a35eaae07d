"""Batches that are dataclasses are looked into, and their classes stay as they are."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_is_leaf

from oomph.errors import BadInput
from oomph.jobs.job import as_long_as, batch_size, plain_batch, split_batch


@dataclass(frozen=True, slots=True)
class Target:
    y: Tensor
    names: list[str]


@dataclass
class Sample:
    x: Tensor
    target: Target
    made: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.made = 1
        self.added = self.x * 2

    @property
    def both(self) -> Tensor:
        return self.x + self.target.y


@dataclass
class Words:
    text: str


class Closed:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def sample(count: int = 5) -> Sample:
    x = torch.arange(float(count))[:, None]
    return Sample(x, Target(x + 1, [f"{at}" for at in range(count)]))


def test_a_dataclass_is_split_by_its_samples() -> None:
    given = sample()
    batch = plain_batch({"batch": given, "words": Words("a")})
    assert batch_size(batch) == 5
    assert as_long_as(batch, 5) == {
        "['batch'].x",
        "['batch'].target.y",
        "['batch'].added",
    }
    first, second = split_batch(batch, 3)
    part = second["batch"]
    assert isinstance(part, Sample)
    assert isinstance(part.target, Target)
    assert part.both.flatten().tolist() == [7.0, 9.0]
    assert part.added.flatten().tolist() == [6.0, 8.0]
    assert (part.made, part.target.names) == (1, given.target.names)
    assert dataclasses.replace(part.target, names=[]).names == []
    assert first["words"] is batch["words"]


def test_the_users_object_and_class_stay_as_they_are() -> None:
    given = sample()
    held = dict(vars(given))
    batch = plain_batch(plain_batch(given))
    batch.x = None
    assert type(given) is Sample
    assert vars(given).keys() == held.keys()
    assert all(vars(given)[name] is one for name, one in held.items())
    assert tree_is_leaf(given)
    assert type(plain_batch(Words("a"))) is Words


def test_a_class_that_lets_nobody_inherit_is_left_alone() -> None:
    @dataclass
    class Final:
        x: Tensor

        def __init_subclass__(cls, **_: Any) -> None:
            raise TypeError("not from me")

    assert type(plain_batch(Final(torch.ones(2)))) is Final


def test_what_nobody_looks_into_is_named() -> None:
    with pytest.raises(BadInput, match="nobody can look into its Closed"):
        batch_size([Closed(torch.ones(2)), "a", 1])
