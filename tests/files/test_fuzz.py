"""A thousand damaged files for each loader: loaded, or refused with an `OomphError`; no more."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.fuzz import cases
from benchmarks.fuzz.cases import run_cases, write_case
from benchmarks.fuzz.damage import damage_value, to_json
from benchmarks.fuzz.loaders import LOADERS, Loader
from oomph.errors import BadInput
from oomph.files.plain_json import BadJson, parse_json


@pytest.mark.parametrize("name", LOADERS)
def test_a_thousand_damaged_files_are_loaded_or_refused(name: str) -> None:
    tally = run_cases(name, 0, LOADERS[name].cases_in_tests)
    assert tally.failures == []
    assert tally.loaded > 20, "damage that leaves nothing to load tries only the first check"
    assert tally.loaded + tally.refused == LOADERS[name].cases_in_tests


@pytest.mark.parametrize("name", LOADERS)
def test_a_number_means_the_same_damage_each_time(name: str, tmp_path: Path) -> None:
    for folder in ("one", "other"):
        write_case(LOADERS[name], 7, tmp_path / folder)
    assert files_in(tmp_path / "one") == files_in(tmp_path / "other") != {}


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- the fuzzer notices what it is there to notice ------------------------------------------------


def loader_that(use: object, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Loader(name="bad", damaged=lambda _: {"file": b""}, use=use)  # type: ignore[arg-type]
    monkeypatch.setitem(LOADERS, "bad", bad)


def test_a_traceback_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(_: Path) -> None:
        raise KeyError("lr")

    loader_that(raises, monkeypatch)
    ((case, problem),) = run_cases("bad", 3, 1).failures
    assert case == 3 and problem.startswith("KeyError: 'lr'")


def test_a_hang_is_a_failure_though_the_loader_catches_all_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hangs(_: Path) -> None:
        while True:
            try:
                sum(range(100))
            except Exception:
                continue

    monkeypatch.setattr(cases, "MOST_SECONDS", 0.05)
    loader_that(hangs, monkeypatch)
    ((_, problem),) = run_cases("bad", 0, 1).failures
    assert problem.startswith("TookTooLong")


def test_much_memory_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "MOST_MEMORY", 1 << 20)
    peak = iter([0, 100 << 20, 100 << 20, 100 << 20])
    monkeypatch.setattr(cases, "_most_memory", lambda: next(peak))
    loader_that(lambda _: None, monkeypatch)
    ((_, problem),) = run_cases("bad", 0, 1).failures
    assert "memory" in problem


def test_a_refusal_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(_: Path) -> None:
        raise BadInput("not this")

    loader_that(refuses, monkeypatch)
    tally = run_cases("bad", 0, 5)
    assert (tally.refused, tally.loaded, tally.failures) == (5, 0, [])


def test_damage_is_of_every_kind() -> None:
    """Deep nesting, numbers beyond all bounds, double keys and lost ends all come up."""
    kinds = ("levels", "twice", "cannot be", "digits")
    seen = set()
    for seed in range(800):
        text = to_json(damage_value({"a": [1, {"b": "c"}], "d": 2.5}, random.Random(seed)))
        try:
            parse_json(text)
        except BadJson as error:
            seen |= {word for word in kinds if word in str(error)}
    assert seen == set(kinds)
