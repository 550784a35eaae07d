"""The framework examples run, and do inside a budget what they do without oomph."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.frameworks import (
    EXAMPLES,
    NAMES,
    SMALL,
    SMALL_BUDGET,
    Outcome,
    compare,
    main,
    read_outcome,
    table,
)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_an_example_trains_alike_with_and_without_oomph(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load(name)
    plain = example.main([*SMALL, "--no-oomph"])
    planned = example.main([*SMALL, "--budget", SMALL_BUDGET])
    assert len(plain["losses"]) == 3
    assert planned["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert planned["batch"] == plain["batch"] == 4
    assert 0 < planned["predicted_gib"] < 6 / 1024
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == planned


# -- the benchmark ---------------------------------------------------------------------------------

DONE = Outcome(ended="done", losses=(2.0, 1.0), batch=4, reserved=1 << 20)
FULL = Outcome(ended="out of memory", error="torch.OutOfMemoryError: CUDA out of memory")


def outcome_of(planned: Outcome = DONE, plain: Outcome = FULL) -> list[str]:
    def run(command: Sequence[str]) -> Outcome:
        if "--budget" not in command:
            return DONE
        return plain if "--no-oomph" in command else planned

    row = compare("plain_fit", "2MiB", [], enforced=True, run=run)
    assert ("!" in table([row])) == bool(row.complaints)
    return row.complaints


def test_a_row_is_as_it_should_be_when_only_oomph_stays_inside_the_budget() -> None:
    assert outcome_of() == []


@pytest.mark.parametrize(
    ("planned", "plain", "complaint"),
    [
        (FULL, FULL, "with oomph: out of memory"),
        (DONE, DONE, "not out of memory"),
        (Outcome(ended="done", losses=(2.0, 1.1), batch=4), FULL, "losses differ by up to 1.0e-01"),
        (Outcome(ended="done", losses=(2.0,), batch=4), FULL, "losses differ by up to inf"),
        (Outcome(ended="done", losses=(2.0, 1.0), batch=2), FULL, "the batch is 2, not 4"),
        (
            Outcome(ended="done", losses=(2.0, 1.0), batch=4, reserved=3 << 20),
            FULL,
            "it took 3.00 MiB",
        ),
    ],
)
def test_whatever_else_happens_is_complained_of(
    planned: Outcome, plain: Outcome, complaint: str
) -> None:
    assert complaint in outcome_of(planned, plain)[0]


def test_a_process_is_read_by_its_last_line_or_its_error() -> None:
    printed = 'noise\n{"losses": [1.5], "batch": 4, "predicted_gib": null, "reserved": null}\n'
    assert read_outcome(0, printed, "") == Outcome(ended="done", losses=(1.5,), batch=4)
    full = "Traceback\n  File …\ntorch.OutOfMemoryError: CUDA out of memory.\noomph: too big\n"
    assert read_outcome(1, "", full).ended == "out of memory"
    assert read_outcome(1, "", "Traceback\nValueError: no OutOfMemoryError\n").ended == "failed"
    assert read_outcome(-9, "", "").error == "ended with -9"


def test_the_smoke_run_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    assert main(["--smoke", "--only", "plain_fit", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["complaints"] == [] and row["plain"] is None
    assert "not enforced" in capsys.readouterr().out
