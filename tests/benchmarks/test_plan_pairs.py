"""The benchmark of plans, as far as it needs no GPU."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import plans
from benchmarks.plans import (
    Pair,
    all_pairs,
    in_parallel,
    load,
    main,
    overran,
    plan_pair,
    run_pair,
    save,
    tasks_of,
)
from benchmarks.real_steps import set_up
from benchmarks.side_by_side import SharedCard
from oomph.errors import DoesNotFit
from oomph.hardware import find_gpu
from oomph.hardware.profile import Profile, load_profile
from oomph.hardware.timing.clock import BARE_LAUNCH, Clock
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.runs.run import Run
from oomph.search.planner import plan as make_plan
from oomph.units import GIB


def ran(measured: float, predicted: float, **more: Any) -> dict[str, Any]:
    peak = {"allocated": int(predicted * GIB), "reserved": int(predicted * GIB)}
    return {
        "untouched": 40 * GIB,
        "budget": 24 * GIB,
        "plan": {"predicted": {"peak": peak, "high": int((predicted + 1) * GIB), "seconds": 0.5}},
        "status": "ok",
        "allocated": int(measured * GIB),
        "reserved": int(measured * GIB),
        "retries": 0,
        **more,
    }


def tiny_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            use_cache=False,
        )
    )


def run_out() -> dict[str, Any]:
    raise torch.OutOfMemoryError("no room")


def run_all(tmp_path: Path, pairs: list[Pair], *, seconds: float) -> dict[str, Any]:
    """What the file holds of pairs that were run."""
    file = tmp_path / "plans.json"
    document = {"pairs": {pair.name: {"budget": 24 * GIB, "plan": {}} for pair in pairs}}
    save(file, document)
    card = SharedCard(at_once=4, patience=2, deadline=time.monotonic() + seconds)
    card.run(tasks_of(document, file))
    return dict(json.loads(file.read_text())["pairs"])


def test_at_least_sixty_pairs_of_twenty_models() -> None:
    pairs = all_pairs()
    assert len({pair.name for pair in pairs}) == len(pairs) >= 60
    assert len({pair.model for pair in pairs}) >= 20


def test_every_pair_is_a_job() -> None:
    for pair in all_pairs()[:: len(plans.SHARES)]:
        make_batch: Any = pair.job().batch
        assert all(leaf.shape[0] == pair.batch for leaf in make_batch(device="meta").values())


def test_a_budget_too_small_becomes_the_smallest_that_is_said_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def make_plan(job: Any, *, budget: int, host: int | None, gpu: str) -> Any:
        asked.append(budget)
        if budget < 50:
            raise DoesNotFit("no plan fits", 50)
        return SimpleNamespace(as_dict=lambda: {"kind": "oomph plan"})

    untouched = SimpleNamespace(peak=SimpleNamespace(device=100))
    monkeypatch.setattr(plans, "make_plan", make_plan)
    monkeypatch.setattr(plans, "estimate", lambda job, gpu: untouched)
    pair = next(pair for pair in all_pairs() if pair.share == 0.4)
    expected = {"untouched": 100, "budget": 50, "plan": {"kind": "oomph plan"}}
    assert plan_pair(pair) == (pair.name, expected)
    assert asked == [40, 50]


def test_work_is_shared_among_processes_and_ends_in_time() -> None:
    assert sorted(in_parallel(abs, [-1, 2, -3], seconds=60)) == [1, 2, 3]
    began = time.monotonic()
    assert list(in_parallel(time.sleep, [60.0], seconds=1)) == []
    assert time.monotonic() - began < 20


def test_a_pair_trains_evaluates_and_is_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def job() -> Job:
        tokens = torch.ones(4, 8, dtype=torch.long)
        return Job(tiny_model, None, "sgd", {"input_ids": tokens, "labels": tokens})

    seen: list[Any] = []

    @contextlib.contextmanager
    def alone() -> Iterator[None]:
        seen.append("alone")
        yield
        seen.append("together")

    def clock(step: Callable[[], Any], count: int) -> float:
        seen.append("clocked")
        return float(step() > 0)

    monkeypatch.setattr(Pair, "job", lambda pair: job())
    monkeypatch.setattr(plans, "set_up", functools.partial(set_up, device="cpu"))
    monkeypatch.setattr(plans, "begin", lambda training, budget: seen.append(budget))
    monkeypatch.setattr(Run, "evaluate", lambda run, batches: seen.append("evaluated"))
    monkeypatch.setattr(plans, "clock", clock)
    monkeypatch.setattr(plans, "peaks", lambda: {"reserved": GIB})
    monkeypatch.setattr(plans, "environment", dict)
    entry = {"plan": make_plan(job(), budget=GIB).as_dict()}
    found = run_pair(all_pairs()[0], entry, SimpleNamespace(alone=alone))  # type: ignore[arg-type]
    assert seen == [GIB, "alone", "clocked", "together", "evaluated"]
    assert found["losses"][0] > found["losses"][1]
    assert found["seconds"] == 1.0


def test_pairs_end_in_their_own_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = all_pairs()[:4]
    ends: dict[str, Callable[[], dict[str, Any]]] = {
        pairs[0].name: lambda: {"reserved": 1},
        pairs[1].name: run_out,
        pairs[2].name: lambda: os._exit(1),
        pairs[3].name: lambda: time.sleep(60) or {},  # type: ignore[func-returns-value]
    }
    monkeypatch.setattr(plans, "run_pair", lambda pair, entry, seat: ends[pair.name]())
    found = run_all(tmp_path, pairs, seconds=60)
    assert [found[pair.name]["status"] for pair in pairs] == [
        "ok",
        "out of memory",
        "failed",
        "timed out",
    ]


def test_the_time_limit_leaves_pairs_for_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "run_pair", lambda pair, entry, seat: time.sleep(60))
    found = run_all(tmp_path, all_pairs()[:2], seconds=0.3)
    assert not any("status" in entry for entry in found.values())


def test_what_ran_is_not_run_again(tmp_path: Path) -> None:
    ready, done, refused = all_pairs()[:3]
    entries = {
        ready.name: {"budget": GIB, "plan": {}},
        done.name: {"budget": 2 * GIB, "plan": {}, "status": "ok"},
        refused.name: {"budget": 3 * GIB, "status": "does not fit"},
    }
    assert [task.needs for task in tasks_of({"pairs": entries}, tmp_path)] == [GIB]


def test_an_overrun_is_more_than_the_interval() -> None:
    assert not overran(ran(20.1, 20.0))
    assert overran(ran(20.5, 20.0))  # with context and kernels, more than 21


def test_the_table_counts_errors_and_names_what_ran_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plans.json"
    out = {**ran(1.0, 1.0), "status": "out of memory"}
    pairs = {
        "a": ran(20.0, 20.0, seconds=0.6),
        "b": ran(20.2, 20.0, retries=2),
        "c": ran(19.0, 20.0),
        "d": out,
    }
    save(file, {"pairs": pairs})
    main(["--table", str(file)])
    printed = capsys.readouterr().out
    assert "4 pairs planned, 3 ran" in printed
    assert "reserved: median 1.000 %, 95 % 5.000 %, worst -5.000 %, exact to the byte 1 of 3" in (
        printed
    )
    assert "1 timed: median 1.20, from 1.20 to 1.20, 1 within 25 %" in printed
    assert "profile" not in printed
    assert "ran out of memory: 1 (d)" in printed
    assert "allocator gave cache back: 1 (b)" in printed
    assert "| b | 40.00 | 24.00 | 20.20 | +1.00 | 2 | ok |" in printed


def test_seconds_are_held_against_both_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plans.json"
    pairs = {
        "a": ran(20.0, 20.0, seconds=0.7, predicted_here=0.7),
        "b": ran(20.0, 20.0, seconds=0.6, predicted_here=0.5),
        "c": ran(20.0, 20.0, seconds=0.6),
    }
    save(file, {"pairs": pairs})
    main(["--table", str(file)])
    printed = capsys.readouterr().out
    assert "predicted, 3 timed: median 1.20, from 1.20 to 1.40, 2 within 25 %" in printed
    assert "profile, 2 timed: median 1.10, from 1.00 to 1.20, 2 within 25 %" in printed


def test_the_machine_is_measured_once_and_all_plans_are_predicted_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    ready, done, refused = (pair.name for pair in all_pairs()[:3])
    plan = {"choices": Choices().as_dict()}
    document = {
        "pairs": {
            ready: {"plan": plan},
            done: {"plan": plan, "status": "ok"},
            refused: {"status": "does not fit"},
        }
    }
    machine = Profile(gpu=plans.GPU, torch="", date="", launch_seconds=1e-5)
    measured: list[float] = []

    def measure(seconds: float) -> Profile:
        measured.append(seconds)
        return machine

    monkeypatch.setattr(plans, "measure_machine", measure)
    monkeypatch.setattr(plans, "in_parallel", lambda work, items, seconds: map(work, items))
    monkeypatch.setattr(
        plans, "predicted_again", lambda pair, choices: Clock.of(find_gpu(plans.GPU)).launch
    )
    usual = plans.predicted_again(all_pairs()[0], Choices())
    for _ in range(2):
        plans.measure_here(document, tmp_path / "plans.json", deadline=time.monotonic() + 60)
    assert len(measured) == 1
    plans.foretell(document, tmp_path / "plans.json")
    written = load(tmp_path / "plans.json", {})
    assert Profile.from_dict(written["profile"]) == machine
    for name in (ready, done):
        assert written["pairs"][name]["predicted_here"] == pytest.approx(usual * 1e-5 / BARE_LAUNCH)
    assert "predicted_here" not in written["pairs"][refused]
    assert load_profile(plans.GPU) is None, "the machine's own settings are as they were"


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "plans.json"
    assert load(file, {"pairs": {}}) == {"pairs": {}}
    save(file, {"pairs": {"a": {}}})
    assert load(file, {}) == json.loads(file.read_text()) == {"pairs": {"a": {}}}
    assert list(file.parent.iterdir()) == [file]


def test_the_clock_is_checked_against_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [pair.name for pair in all_pairs()[:3]]
    measured = dict(zip(pairs, (1.0, 2.0, 1.2), strict=True))
    plan = {"choices": Choices().as_dict()}
    entries = {name: {"plan": plan, "seconds": seconds} for name, seconds in measured.items()}
    entries["never/timed"] = {"plan": plan}
    monkeypatch.setattr(plans, "predicted_again", lambda pair, choices: 1.0)
    monkeypatch.setattr(plans, "in_parallel", lambda work, items, seconds: map(work, items))
    said = plans.check_clock({"pairs": entries}).splitlines()
    assert said[0] == "2 of 3 within 25 %, median 1.20"
    assert sorted(said[2:]) == sorted(f"{measured[name]:.2f} {name}" for name in pairs)


def test_a_machine_that_was_not_measured_foretells_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "plans.json", {"schema": 1, "pairs": {}})
    with pytest.raises(SystemExit):
        main(["--foretell", str(tmp_path / "plans.json")])
    assert "was not measured: use --clock" in capsys.readouterr().err


def test_where_only_plans_that_are_there_are_run_none_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hours of a card are not for planning."""
    planned: list[int] = []
    ran: list[int] = []

    class Card:
        def __init__(self, **_: Any) -> None:
            pass

        def run(self, tasks: list[Any]) -> None:
            ran.append(len(tasks))

    def in_parallel(work: Any, items: Any, seconds: float) -> Any:
        planned.append(len(items))
        return iter(())

    monkeypatch.setattr(plans, "SharedCard", Card)
    monkeypatch.setattr(plans, "in_parallel", in_parallel)
    monkeypatch.setattr(plans, "measure_here", lambda *_, **__: None)
    ready = {all_pairs()[0].name: {"plan": {}, "budget": 1}}
    save(tmp_path / "plans.json", {"schema": 1, "pairs": ready})
    for only_runs in (False, True):
        plans.measure(tmp_path, deadline=time.monotonic() + 60, only_runs=only_runs)
    assert planned == [len(all_pairs()) - 1, 0]
    assert ran == [1, 1]
