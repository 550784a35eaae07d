"""Runs that answer to a card that others fill, or that is filled here: to be run alone on it."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs_on_a_card import SAMPLES, a_batch, differences, start, state_of

import oomph
from oomph.explaining.causes import CauseKind
from oomph.hardware import find_gpu
from oomph.plans.choices import Choices
from oomph.runs.elastic import Elastic, Elasticity
from oomph.runs.fallback_plans import Fallback
from oomph.runs.run import Run
from oomph.units import GIB, MIB

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def a_clean_card() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def test_a_hog_on_the_card_makes_the_run_split_the_batch() -> None:
    parts = Choices(micro_batch=SAMPLES // 8)
    expected_run = start(parts)
    torch.manual_seed(7)
    expected = [float(expected_run.step(a_batch(seed))) for seed in range(2)]
    expected_state = state_of(expected_run)
    del expected_run
    run = start(Choices(), parts)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - 150 * MIB, dtype=torch.uint8, device="cuda")
    torch.manual_seed(7)
    losses = [float(run.step(a_batch(seed))) for seed in range(2)]
    del hog
    assert [event.after.choices for event in run.events] == [parts], said(run)
    assert losses == expected
    assert not differences(state_of(run), expected_state)


def test_an_elastic_run_follows_what_others_leave_of_the_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = start(Choices())
    first, adapting = run.plan, run._adapting
    slower = dataclasses.replace(first.predicted, seconds=2 * first.predicted.seconds)
    parts = Choices(micro_batch=SAMPLES // 8)
    lean = Fallback(
        plan=dataclasses.replace(first, choices=parts, predicted=slower), need=2 * GIB, retries=0
    )
    assert adapting.fallback.need > lean.need
    adapting._fallbacks_by_plan[0].steps_down.append(lean)
    card = find_gpu(torch.cuda.get_device_name())
    elasticity = Elasticity(Elastic(patience=2), torch.device("cuda", 0), card)
    adapting._elasticity = elasticity
    run.step(a_batch(0))
    assert run.plan == first, f"others leave {elasticity._left()} bytes: {said(run)}"
    taken, real = elasticity._left() - lean.need, torch.cuda.mem_get_info

    def after_others(device: Any = None) -> tuple[int, int]:
        free, total = real(device)
        return free - taken, total

    monkeypatch.setattr(torch.cuda, "mem_get_info", after_others)
    run.step(a_batch(1))
    assert run.plan == lean.plan, said(run)
    monkeypatch.undo()
    for seed in (2, 0, 1, 2):
        run.step(a_batch(seed))
    assert run.plan == first, said(run)
    shrunk, _ = run.events
    assert shrunk.cause == "others took memory of the card", said(run)


def said(run: Run) -> list[str]:
    return [str(event) for event in run.events]


NEIGHBOUR = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.read()
"""


def test_memory_held_by_another_process_is_named_as_the_cause(tmp_path: Path) -> None:
    torch.ones(1, device="cuda")
    gc.collect()
    torch.cuda.empty_cache()
    left, total = 4 * GIB, torch.cuda.get_device_properties(0).total_memory
    neighbour = subprocess.Popen(
        [sys.executable, "-c", NEIGHBOUR, str(left)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    watch = oomph.watch(report=tmp_path / "report.json")
    try:
        assert neighbour.stdout is not None
        assert neighbour.stdout.readline() == "ready\n"
        with pytest.raises(torch.OutOfMemoryError), watch:
            torch.empty(2 * left, dtype=torch.uint8, device="cuda")
    finally:
        neighbour.communicate("")
    assert watch.report is not None
    assert watch.report.cause.kind is CauseKind.HELD_BY_OTHERS, watch.report.headline
    assert watch.report.cause.size > total - left - 8 * GIB
    assert watch.report.evidence.asked == 2 * left
