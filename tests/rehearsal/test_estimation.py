"""Verdicts, intervals and ledgers of an estimate."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn

from oomph.errors import BadInput, UnknownName
from oomph.hardware import find_gpu
from oomph.jobs.job import Job
from oomph.plans.ledgers import LEDGERS
from oomph.rehearsal.allocator import AllocatorSettings
from oomph.rehearsal.estimation import Estimate, estimate, judge
from oomph.rehearsal.hidden import device_overhead
from oomph.rehearsal.phases import PHASES, rehearse
from oomph.rehearsal.timeline import Block, Timeline
from oomph.units import GIB, MIB

H200 = find_gpu("h200")


def job() -> Job:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 16, 3), nn.Flatten(), nn.Linear(16 * 30 * 30, 512))

    return Job(
        build,
        lambda model, batch: model(batch).square().mean(),
        "adamw",
        lambda: torch.randn(256, 3, 32, 32),
        name="small",
    )


@pytest.fixture(scope="module")
def on_gpu() -> Timeline:
    return rehearse(job(), H200)


@pytest.fixture(scope="module")
def on_cpu() -> Timeline:
    return rehearse(job(), None)


def judged(timeline: Timeline, budget: int | None, *, gpu: bool, conf: str = "") -> Estimate:
    return judge(
        timeline,
        job="small",
        gpu=H200 if gpu else None,
        budget=budget,
        settings=AllocatorSettings.parse(conf),
        phases=PHASES,
        seconds=0.0,
    )


def test_on_the_cpu_the_verdict_turns_at_the_very_byte(on_cpu: Timeline) -> None:
    peak = judged(on_cpu, None, gpu=False).peak.device
    assert judged(on_cpu, peak, gpu=False).verdict == "fits"
    assert judged(on_cpu, peak - 1, gpu=False).verdict == "does_not_fit"
    assert judged(on_cpu, None, gpu=False).smallest_budget == peak


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_on_a_gpu_the_verdict_is_fits_then_inconclusive_then_not(
    on_gpu: Timeline, conf: str
) -> None:
    free = judged(on_gpu, None, gpu=True, conf=conf)
    order = {"fits": 0, "inconclusive": 1, "does_not_fit": 2}
    top = free.interval["device"].high
    budgets = [top * percent // 100 for percent in range(120, 0, -4)]
    verdicts = [judged(on_gpu, budget, gpu=True, conf=conf).verdict for budget in budgets]
    assert [order[v] for v in verdicts] == sorted(order[v] for v in verdicts)
    assert {*verdicts} == {*order}


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_the_smallest_budget_fits_and_nothing_much_smaller_does(
    on_gpu: Timeline, conf: str
) -> None:
    smallest = judged(on_gpu, None, gpu=True, conf=conf).smallest_budget
    assert judged(on_gpu, smallest, gpu=True, conf=conf).verdict == "fits"
    assert judged(on_gpu, int(smallest * 0.97), gpu=True, conf=conf).verdict != "fits"


def test_the_budget_counts_the_context_too(on_gpu: Timeline) -> None:
    free = judged(on_gpu, None, gpu=True)
    assert free.peak.device == free.peak.reserved + device_overhead(H200).expected
    assert judged(on_gpu, free.peak.reserved, gpu=True).verdict != "fits"
    assert judged(on_gpu, 1, gpu=True).verdict == "does_not_fit"


def test_the_ledgers_lie_in_their_intervals_and_in_order(on_gpu: Timeline) -> None:
    free = judged(on_gpu, None, gpu=True)
    assert free.peak.allocated <= free.peak.reserved <= free.peak.device
    for ledger in LEDGERS:
        interval = free.interval[ledger]
        assert interval.low <= getattr(free.peak, ledger) <= interval.high
    assert free.interval_reasons


def test_the_peak_is_that_of_the_highest_phase(on_gpu: Timeline) -> None:
    free = judged(on_gpu, None, gpu=True)
    assert free.peak.allocated == max(phase.allocated for phase in free.phases.values())
    assert free.phases[free.peak_at.phase].allocated == free.peak.allocated
    assert free.peak.reserved == max(phase.reserved for phase in free.phases.values())


def test_what_is_alive_at_the_peak_adds_up_to_it(on_cpu: Timeline) -> None:
    free = judged(on_cpu, None, gpu=False)
    assert sum(free.categories_at_peak.values()) == free.peak.allocated
    assert sum(free.modules_at_peak.values()) == free.peak.allocated
    assert free.peak_at.op


def test_at_the_cap_the_allocator_cleans_up_before_it_fails(on_gpu: Timeline) -> None:
    free = judged(on_gpu, None, gpu=True)
    if free.smallest_budget - device_overhead(H200).high < free.peak.reserved - 2 * MIB:
        tight = judged(on_gpu, free.smallest_budget, gpu=True)
        assert tight.allocator_retries > 0
    assert judged(on_gpu, 100 * GIB, gpu=True).allocator_retries == 0


def test_an_estimate_is_plain_json_with_the_keys_that_stay(on_gpu: Timeline) -> None:
    document = json.loads(json.dumps(judged(on_gpu, 8 * GIB, gpu=True).as_dict()))
    assert document["schema_version"] == 1
    assert document["verdict"] == "fits"
    assert document["peak"].keys() == {*LEDGERS}
    assert document["interval"]["device"].keys() == {"low", "high"}
    assert list(document["phases"]) == list(PHASES)
    assert document["phases"]["step"].keys() == {*LEDGERS}
    assert {"phase", "module", "op"} <= document["peak_at"].keys()
    assert {"categories_at_peak", "budget", "seconds"} <= document.keys()


def test_without_a_budget_the_whole_card_counts() -> None:
    assert estimate(job(), "h200").budget == H200.memory
    assert estimate(job(), "h200", budget="2GiB").budget == 2 * GIB
    assert estimate(job()).budget is None
    assert estimate(job()).verdict == "fits"


@pytest.mark.parametrize("budget", ["0", "-1GiB", "nan", "inf", "1e30", "a lot", "", 0, -5])
def test_a_budget_that_cannot_be_meant_is_refused(budget: str | int) -> None:
    with pytest.raises(BadInput):
        estimate(job(), "h200", budget=budget)


def test_an_unknown_gpu_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="h200"):
        estimate(job(), "h2000")


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_what_takes_no_memory_is_judged_all_the_same(conf: str) -> None:
    nothing = Timeline()
    found = judged(nothing, 8 * GIB, gpu=True, conf=conf)
    assert found.verdict == "fits"
    assert found.peak.reserved == 0
    assert device_overhead(H200).high <= found.smallest_budget < 2 * device_overhead(H200).high


def test_the_smallest_blocks_are_judged_all_the_same() -> None:
    one_byte = Timeline(blocks=[Block(size=1, birth=0)], events=1)
    assert judged(one_byte, 8 * GIB, gpu=True).smallest_budget < 2 * device_overhead(H200).high


def test_nothing_surely_fits_that_was_not_rehearsed_as_meant(on_gpu: Timeline) -> None:
    doubted = dataclasses.replace(on_gpu, warnings=["The model stayed on the host."])
    found = judged(doubted, 100 * GIB, gpu=True)
    assert found.verdict == "inconclusive"
    assert found.as_dict()["warnings"] == ["The model stayed on the host."]
    assert str(found).splitlines()[1] == "The model stayed on the host."
    assert judged(doubted, 1, gpu=True).verdict == "does_not_fit"
