"""Choices that were run on an H200 take the memory that is predicted for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import oomph
from oomph.plans.choices import Choices
from oomph.rehearsal.phases import rehearse
from oomph.rehearsal.step_cost import peak_allocated

TRUTH = Path(__file__).parents[2] / "benchmarks/truth/h200-torch-2.11-choices.json"
CASES: list[dict[str, Any]] = json.loads(TRUTH.read_text())["cases"]
BLOCKS = 16


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['how'][:24]}-{case['loss_chunk']}")
def test_allocated_memory_is_predicted(case: dict[str, Any]) -> None:
    options = dict(case)
    measured, how = options.pop("allocated"), options.pop("how")
    job = oomph.job_from_name(
        "llama-3.2-1b", batch=16, seq=2048, precision="bf16-mixed", optimizer="adamw-fused"
    )
    choices = Choices(
        precision="bf16-mixed",
        head="lm_head",
        blocks={f"model.layers.{at}": how for at in range(BLOCKS)},
        **options,
    )
    timeline = rehearse(
        job, oomph.find_gpu("h200"), ("build", "step"), choices=choices, skip_first_step=True
    )
    assert peak_allocated(timeline) == pytest.approx(measured, rel=2e-3)
