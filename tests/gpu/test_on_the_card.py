"""Predictions against the GPU that is here. Skipped where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.accuracy import LEDGERS, compare, measured_peaks
from benchmarks.cases import Case, all_cases
from oomph.hardware import find_gpu

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NAMES = [
    "smollm2-135m/8x1024/bf16-mixed/adamw",
    "gpt2-medium/4x512/fp32/sgd-momentum",
    "resnet-50/64x224/bf16-mixed/sgd-momentum/expandable",
    "lstm/32x256/bf16-mixed/adamw",
]

#: In a process that forks before it uses the card, and of the truth only what is compared here.
MEASURE = """
import json, sys
from pathlib import Path
from benchmarks.cases import all_cases
from benchmarks.measure import run_all
path, *names = sys.argv[1:]
cases = [case for case in all_cases() if case.name in names]
results = run_all(cases, dict.fromkeys(names, 0))
kept = [{key: one[key] for key in ("name", "phases", "error") if key in one} for one in results]
Path(path).write_text(json.dumps(kept))
"""


def case_of(name: str) -> Case:
    return next(case for case in all_cases() if case.name == name)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    path = tmp_path_factory.mktemp("measured") / "cases.json"
    command = [sys.executable, "-c", MEASURE, str(path), *NAMES]
    done = subprocess.run(command, cwd=ROOT, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {record["name"]: record for record in json.loads(path.read_text())}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_measured_lies_in_the_predicted_interval(
    name: str, measured: dict[str, dict[str, Any]]
) -> None:
    record = measured[name]
    assert "error" not in record, record["error"]
    row = compare(case_of(name), record, gpu=find_gpu(torch.cuda.get_device_name()))
    for ledger in LEDGERS:
        interval = row.predicted.interval[ledger]
        assert interval.low <= measured_peaks(record)[ledger] <= interval.high, ledger


def test_a_rehearsal_takes_no_memory_of_the_card() -> None:
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    case = case_of("encoder/16x512/bf16-mixed/adamw")
    compare(case, {"phases": {"step": dict.fromkeys(LEDGERS, 1)}})
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
