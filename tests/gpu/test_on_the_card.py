"""Predictions against the GPU that is here. Skipped where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import oomph
from benchmarks.accuracy import LEDGERS, compare, measured_peaks
from benchmarks.cases import all_cases
from oomph.gpus import find_gpu
from oomph.running.run import enforce
from oomph.units import GIB

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


def test_a_model_and_a_batch_on_the_card_are_planned_for_and_trained() -> None:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(512, (4, 64), device="cuda")
    batch = {"input_ids": tokens, "labels": tokens}
    with oomph.fit(model, optimizer, None, batch, precision="bf16-mixed", time_blocks=True) as run:
        losses = [float(run.step(batch)) for _ in range(5)]
    assert losses[-1] < losses[0]


def test_a_budget_is_enforced_on_a_card_without_a_number() -> None:
    card = find_gpu(torch.cuda.get_device_name())
    try:
        enforce(8 * GIB, card, torch.device("cuda"))
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(8 * GIB, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
