"""What a real GPU measured, kept in the repository, against what is predicted without one."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from benchmarks.accuracy import LEDGERS, TRUTH, Row, compare, main, truth
from benchmarks.cases import Case, all_cases
from oomph.rehearsal.allocator import AllocatorSettings, replay_trace

CASES = {case.name: case for case in all_cases()}
RECORDS: dict[str, dict[str, Any]] = {record["name"]: record for record in truth()["cases"]}
HISTORIES: list[dict[str, Any]] = json.loads(
    gzip.decompress((TRUTH / "h200-torch-2.11-histories.json.gz").read_bytes())
)

#: Quick ones of every family; `python -m benchmarks.accuracy` compares them all.
EXACT = [
    "llama-3.2-1b/2x1024/fp32/adamw",
    "llama-3.2-1b/4x1024/bf16/adamw/expandable",
    "gpt2-medium/8x1024/bf16-mixed/adamw",
    "gpt2-medium/4x512/fp32/sgd-momentum",
    "gpt2/16x512/fp16-mixed/adamw-fused",
    "olmoe-1b-7b/2x512/bf16/sgd",
    "bert-large/16x512/bf16-mixed/adamw",
    "bert-large/8x384/fp32/adamw/checkpointing=full",
    "mlp/4096x1/bf16-mixed/adamw",
]
CLOSE = [
    "t5-base/4x512/fp32/sgd-momentum",
    "vit-base/32x224/fp32/sgd-momentum",
    "resnet-50/64x224/fp32/sgd-momentum",
    "resnet-50/64x224/bf16-mixed/sgd-momentum/expandable",
    "lstm/32x256/fp32/adamw",
    "lstm/32x256/bf16-mixed/adamw",
    "gru/16x128/fp32/sgd-momentum",
    "unet/16x128/bf16-mixed/adamw",
    "encoder/16x512/bf16-mixed/adamw",
    "wav2vec2-base/8x80000/fp32/adamw",
]
#: Measured before there was a prediction, with torch.cuda's counters (GiB).
MEASURED_BEFORE = {
    "llama-3.2-1b/16x2048/bf16-mixed/adamw-fused/micro_batch=4": (48.45, 52.30),
    "llama-3.2-1b/16x2048/bf16-mixed/adamw-fused/micro_batch=1": (27.70, 28.22),
    "llama-3.2-1b/16x2048/bf16-mixed/adamw-fused/micro_batch=4/checkpointing=full": (31.87, 34.03),
    "llama-3.2-1b/16x2048/bf16-mixed/adamw-fused/micro_batch=1/checkpointing=full": (23.53, 24.60),
}


def row_of(name: str) -> Row:
    return compare(CASES[name], RECORDS[name])


@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history["name"])
def test_a_recorded_history_replays_to_the_byte(history: dict[str, Any]) -> None:
    trace = [
        ("alloc", address, size, stream) if action == "alloc" else ("free", address)
        for action, address, size, stream in history["events"]
    ]
    stats = replay_trace(trace, AllocatorSettings.parse(history["allocator"]))
    assert stats.peak_allocated == history["allocated"]
    assert stats.peak_reserved == history["reserved"]
    assert stats.peak_segments == history["segments"]


def test_histories_of_both_kinds_of_segments_are_kept() -> None:
    assert len(HISTORIES) >= 10
    assert {history["allocator"] for history in HISTORIES} == {"", "expandable_segments:True"}


@pytest.mark.parametrize("name", EXACT)
def test_the_peak_is_predicted_to_the_byte(name: str) -> None:
    row = row_of(name)
    assert row.predicted.peak.allocated == row.measured["allocated"]


@pytest.mark.parametrize("name", CLOSE)
def test_the_measured_peak_lies_in_the_predicted_interval(name: str) -> None:
    row = row_of(name)
    assert not any(row.outside(ledger) for ledger in LEDGERS)
    assert abs(row.error("allocated")) < 2


@pytest.mark.parametrize("name", MEASURED_BEFORE)
def test_runs_measured_independently_are_predicted(name: str) -> None:
    allocated, reserved = MEASURED_BEFORE[name]
    peak = row_of(name).predicted.peak
    assert peak.allocated / 2**30 == pytest.approx(allocated, rel=0.003)
    assert peak.reserved / 2**30 == pytest.approx(reserved, rel=0.02)


def test_truth_covers_what_it_should() -> None:
    measured = [CASES[name] for name, record in RECORDS.items() if "error" not in record]

    def kinds(get: Any, cases: list[Case]) -> set[str]:
        return {get(case) for case in cases}

    assert len(measured) >= 40
    assert len(kinds(lambda case: case.name.split("/")[0], measured)) >= 12
    assert len(kinds(lambda case: case.family, measured)) >= 5
    assert len(kinds(lambda case: case.name.split("/")[3], measured)) >= 3
    held_out = [case for case in measured if case.held_out]
    assert abs(len(held_out) - len(measured) / 2) <= 2


def test_the_benchmark_prints_both_halves_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mlp/4096x1/bf16-mixed/adamw", "mlp/2048x1/fp32/sgd-momentum"]) == 0
    printed = capsys.readouterr().out
    assert "development, 1 cases" in printed
    assert "held out, 1 cases" in printed
