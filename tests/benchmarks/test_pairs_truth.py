"""Plans that were run on an H200: what they took beside what was predicted for them."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

import oomph
from benchmarks.plans import all_pairs, overran
from oomph.planning.audition import peak_allocated
from oomph.planning.choices import Choices
from oomph.rehearsal.hidden import device_overhead
from oomph.rehearsal.phases import rehearse

TRUTH = Path(__file__).parents[2] / "benchmarks/truth/h200-torch-2.11-plans.json"
PAIRS: dict[str, dict[str, Any]] = json.loads(TRUTH.read_text())["pairs"]

#: Quick to rehearse, and unlike each other: whole blocks kept, experts, an encoder of images.
QUICK = [
    "llama-3.2-1b/4x2048/bf16-mixed/adamw-fused/90%",
    "olmoe-1b-7b/4x1024/bf16/sgd/60%",
    "dinov2-large/64x224/bf16-mixed/adamw/90%",
]
#: Those whose reserved memory left the interval, all inside their budgets.
OUTSIDE = {
    "llama-3.2-1b/4x2048/bf16-mixed/adamw-fused/90%",
    "qwen2.5-0.5b/4x2048/bf16-mixed/adamw-fused/90%",
    "smollm2-360m/8x2048/bf16-mixed/adamw-fused/90%",
    "t5-base/16x512/bf16-mixed/adamw/90%",
}


def test_no_plan_overran_its_budget() -> None:
    hidden = device_overhead(oomph.find_gpu("h200")).expected
    assert all(pair["reserved"] + hidden <= pair["budget"] for pair in PAIRS.values())


def test_the_median_error_is_below_two_percent() -> None:
    for ledger in ("allocated", "reserved"):
        errors = [
            abs(pair[ledger] / pair["plan"]["predicted"]["peak"][ledger] - 1)
            for pair in PAIRS.values()
        ]
        assert statistics.median(errors) < 0.02


def test_only_the_known_ones_left_their_interval() -> None:
    assert {name for name, pair in PAIRS.items() if overran(pair)} == OUTSIDE


@pytest.mark.parametrize("name", QUICK)
def test_what_is_predicted_now_is_what_was_measured(name: str) -> None:
    job = next(pair for pair in all_pairs() if pair.name == name).job()
    choices = Choices(**PAIRS[name]["plan"]["choices"])
    timeline = rehearse(
        job, oomph.find_gpu("h200"), ("build", "step"), choices=choices, skip_first_step=True
    )
    assert peak_allocated(timeline) == pytest.approx(PAIRS[name]["allocated"], rel=5e-3)
