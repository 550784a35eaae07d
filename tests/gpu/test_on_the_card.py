"""Predictions against the GPU that is here. Skipped where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.accuracy import LEDGERS, compare, measured_peaks
from benchmarks.cases import all_cases
from oomph.gpus import find_gpu

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NAMES = [
    "smollm2-135m/8x1024/bf16-mixed/adamw",
    "gpt2-medium/4x512/fp32/sgd-momentum",
    "resnet-50/64x224/bf16-mixed/sgd-momentum/expandable",
    "lstm/32x256/bf16-mixed/adamw",
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    folder = tmp_path_factory.mktemp("measured")
    command = [sys.executable, "-m", "benchmarks.measure", str(folder), *NAMES]
    subprocess.run(command, check=True, cwd=ROOT, timeout=300)
    document = json.loads((folder / "cases.json").read_text())
    return {record["name"]: record for record in document["cases"]}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_measured_lies_in_the_predicted_interval(
    name: str, measured: dict[str, dict[str, object]]
) -> None:
    case = next(case for case in all_cases() if case.name == name)
    row = compare(case, measured[name], gpu=find_gpu(torch.cuda.get_device_name()))
    for ledger in LEDGERS:
        interval = row.predicted.interval[ledger]
        assert interval.low <= measured_peaks(measured[name])[ledger] <= interval.high


def test_a_rehearsal_takes_no_memory_of_the_card() -> None:
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    compare(all_cases()[10], {"phases": {"step": dict.fromkeys(LEDGERS, 1)}})
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
