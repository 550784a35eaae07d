"""What an installed package keeps of a rehearsed forward is taken out of its tables again."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oomph import Job, estimate
from oomph.errors import CannotRehearse
from oomph.rehearsal import left_behind
from oomph.splitting import prove_split
from oomph.techniques.python_state import PythonState

PACKAGE = """
import functools
import torch

TABLE = {}
KEPT = {"old": torch.ones(1)}
NESTED = {"angles": {}, "old": [torch.ones(1)]}
LAST = None


class Angles:
    known = {}

    def __init__(self):
        self.rows = []

    def of(self, count):
        if count not in Angles.known:
            Angles.known[count] = torch.arange(count).float()
            self.rows.append(torch.ones(count))
        return Angles.known[count] + self.rows[-1]


SHARED = Angles()


@functools.lru_cache
def remembered(count):
    return torch.ones(count)


def closed():
    inside = {}

    def get(count):
        return inside.setdefault(count, (torch.ones(count), "one"))[0]

    return get, inside


get, INSIDE = closed()


def _tables(count):
    if count not in TABLE:
        TABLE[count] = torch.ones(count)
        KEPT[count] = {"cos": torch.ones(count)}
    return TABLE[count] + KEPT[count]["cos"] + remembered(count) + get(count) + SHARED.of(count)


def _last(count):
    global LAST
    if LAST is None:
        LAST = torch.ones(count)
    return LAST


def tables(count):
    return _tables(count)


def last(count):
    return _last(count)


class Signals:
    # A trainer's: the handlers that were there before its own.

    def __init__(self, *handlers):
        self.before = list(handlers)


def handler_of(session):
    def handle():
        return session

    return handle
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "keeps_tables.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("keeps_tables")
    del sys.modules["keeps_tables"]


class Net(nn.Module):
    def __init__(self, table: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.table(4)


def test_tables_of_a_package_are_as_they_were(package: ModuleType) -> None:
    model = Net(package.tables)
    job = Job(model, nn.MSELoss(), "sgd", (torch.ones(2, 4), torch.ones(2, 4)))
    for look in (lambda: estimate(job), lambda: prove_split(job, None)):
        look()
        assert (package.TABLE, list(package.KEPT), package.INSIDE) == ({}, ["old"], {})
        assert (package.Angles.known, package.SHARED.rows) == ({}, [])
        assert package.remembered.cache_info().currsize == 0
    assert type(model(torch.ones(2, 4))) is Tensor
    estimate(job)
    assert list(map(type, package.TABLE.values())) == [Tensor]


def test_a_variable_that_keeps_a_tensor_is_named(package: ModuleType) -> None:
    model = Net(package.last)
    job = Job(model, nn.MSELoss(), "sgd", (torch.ones(2, 4), torch.ones(2, 4)))
    with pytest.raises(CannotRehearse, match=r"keeps_tables\.LAST .* run one batch"):
        estimate(job)
    assert package.LAST is None
    model(torch.ones(2, 4))
    assert estimate(job).fits


def test_what_callbacks_of_a_package_see_is_its_own_business(package: ModuleType) -> None:
    session: list[int] = []
    theirs, mine = package.handler_of(session), [0]

    def handle() -> int:
        return mine[0]

    model = nn.Linear(4, 4)
    model.signals = package.Signals(theirs, handle)
    state = PythonState([("the model", model)])
    session.append(1)  # the package's own thread, in the meantime
    assert state.is_current
    mine[0] = 1
    assert not state.is_current


def test_nothing_is_searched_where_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def search(_: Any) -> None:
        raise AssertionError("modules are gone through")

    monkeypatch.setattr(left_behind, "_Search", search)
    job = Job(nn.Linear(4, 4), nn.MSELoss(), "sgd", (torch.ones(2, 4), torch.ones(2, 4)))
    estimate(job)
    prove_split(job, None)
