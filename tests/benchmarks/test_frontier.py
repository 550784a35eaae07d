"""The frontier benchmark, as far as it needs no GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import frontier
from benchmarks.frontier import (
    CROWDED,
    OOMPH,
    SUITES,
    Found,
    Suite,
    Turn,
    cap,
    fastest_peer,
    follows,
    main,
    missing,
    parse_budgets,
    plan_path,
    put,
    ratio,
    render,
    results_path,
    take_turns,
    turns_of,
)
from benchmarks.peers import LLAMA_PEERS, Peer, checkpoint, compile_layers
from benchmarks.plans import save
from benchmarks.real_steps import Training, attempt, set_up
from benchmarks.side_by_side import ROOM, Seat
from oomph.jobs.job import Job
from oomph.search.planner import plan as make_plan
from oomph.units import GIB

SUITE = dataclasses.replace(
    SUITES["llama-3.2-1b"],
    peers=(Peer(what="eager", micro_batch=16), Peer(what="eager", micro_batch=4)),
)


def ok(rate: float, reserved: float = 50.0, **more: Any) -> dict[str, Any]:
    size = int(reserved * GIB)
    return {"status": "ok", "rate": rate, "allocated": size - GIB, "reserved": size, **more}


OUT = {"status": "out of memory"}


def made_up() -> dict[str, Any]:
    planned = {
        "predicted": {
            "tokens": 32768,
            "samples": 16,
            "seconds": 0.5,
            "peak": {"reserved": 22 * GIB},
        },
        "planning_seconds": 9.5,
        "summary": "compile: blocks",
    }
    return {
        "suite": "llama-3.2-1b",
        "settings": "16 × 2048",
        "counts": "tokens",
        "environment": {"gpu": "NVIDIA H200", "torch": "2.11.0", "transformers": "5.17"},
        "rows": {
            OOMPH: {
                "unlimited": ok(70000.0),
                "24": ok(54000.0, 22.5, **planned),
                "16": {"status": "does not fit", "smallest": 18 * GIB},
            },
            "eager, mb16": {"unlimited": OUT, "24": OUT, "16": OUT},
            "compile, mb16": {"unlimited": ok(60000.0), "24": OUT, "16": OUT},
            "Liger, mb16": {"unlimited": ok(50000.0, 23.0), "24": ok(45000.0, 23.0), "16": OUT},
        },
    }


# -- suites and peers ------------------------------------------------------------------------------


@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda suite: suite.name)
def test_a_suite_trains_what_it_counts(suite: Suite) -> None:
    make_batch: Any = suite.job().batch
    batch = make_batch(device="meta")
    counted = "input_ids" if suite.counts == "tokens" else "labels"
    assert batch[counted].numel() == suite.items
    assert {tensor.shape[0] for tensor in batch.values()} == {suite.batch}


@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda suite: suite.name)
def test_no_two_rows_have_one_name(suite: Suite) -> None:
    names = [OOMPH, *(peer.name for peer in suite.peers)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda suite: suite.name)
def test_suites_start_without_a_limit_and_go_down(suite: Suite) -> None:
    assert parse_budgets(",".join(map(frontier.key, suite.budgets))) == suite.budgets
    assert suite.budgets[0] is None


def tiny_job() -> Job:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )
    tokens = torch.ones(4, 8, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    return Job(functools.partial(LlamaForCausalLM, config), None, "sgd", batch)


def trained(peer: Peer, steps: int = 2) -> tuple[Training, list[float]]:
    training = set_up(tiny_job(), "cpu")
    step = peer.make_step(training, "fp32")
    return training, [float(step()) for _ in range(steps)]


@pytest.mark.parametrize(
    "peer",
    [
        Peer(what="eager", micro_batch=1),
        Peer(what="eager", micro_batch=3),
        Peer(what="checkpointing", micro_batch=4, changes=(checkpoint,)),
    ],
    ids=lambda peer: peer.name,
)
def test_peers_train_the_same_model(peer: Peer) -> None:
    whole, losses = trained(Peer(what="eager", micro_batch=4))
    other, other_losses = trained(peer)
    assert losses[0] != losses[1]
    assert other_losses == pytest.approx(losses, rel=1e-5)
    for ours, theirs in zip(other.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert other.model.is_gradient_checkpointing is (checkpoint in peer.changes)


def test_every_layer_is_compiled_and_nothing_else() -> None:
    model = set_up(tiny_job(), "cpu").model
    compile_layers(model)
    compiled = [name for name, module in model.named_modules() if module._compiled_call_impl]
    assert compiled == ["model.layers.0", "model.layers.1"]


def test_peers_that_need_liger_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    absent = {peer.name for peer in LLAMA_PEERS if not peer.is_installed}
    assert absent == {
        peer.name for peer in LLAMA_PEERS if "Liger" in peer.what or "fused loss" in peer.what
    }


def test_the_batch_is_no_placeholder() -> None:
    batch = set_up(tiny_job(), "cpu").batch
    assert batch["input_ids"].unique().numel() > 8
    assert batch["input_ids"].max() < 64


def test_running_out_of_memory_is_known_inside_another_error() -> None:
    def work() -> dict[str, Any]:
        try:
            raise torch.OutOfMemoryError("no room")
        except torch.OutOfMemoryError as error:
            raise RuntimeError("the compiler failed") from error

    assert attempt(work) == {"status": "out of memory"}


def test_another_error_is_a_failure() -> None:
    def work() -> dict[str, Any]:
        raise RuntimeError("out of memory, said by somebody else")

    assert attempt(work)["status"] == "failed"


# -- what follows, and what is left ----------------------------------------------------------------


def test_a_run_that_stayed_below_a_cap_is_not_run_again() -> None:
    cells = {"unlimited": ok(1.0, reserved=23.0)}
    assert follows(cells, 24) == {**cells["unlimited"], "copied": True}


def test_the_cap_leaves_room_for_what_no_tensor_shows() -> None:
    assert 23 * GIB < cap(24) < 24 * GIB
    assert follows({"unlimited": ok(1.0, reserved=23.9)}, 24) is None


@pytest.mark.parametrize("status", ["out of memory", "failed"])
def test_what_ended_with_more_memory_ends_with_less(status: str) -> None:
    cells = {"unlimited": ok(1.0), "40": {"status": status}}
    assert follows(cells, 24) == {"status": status, "copied": True}
    assert follows(cells, 64) == {**cells["unlimited"], "copied": True}


def test_what_had_more_tensors_than_a_budget_holds_runs_out_under_it() -> None:
    cells = {"unlimited": ok(1.0, reserved=26.0)}
    assert follows(cells, 24) == {"status": "out of memory", "copied": True}


def test_the_same_budget_tells_nothing() -> None:
    assert follows({"24": OUT}, 24) is None


def test_cells_that_are_there_are_not_run_again(tmp_path: Path) -> None:
    path = results_path(tmp_path, SUITE)
    put(path, SUITE, "eager, mb16", None, OUT)
    put(path, SUITE, "eager, mb4", None, ok(40000.0))
    put(path, SUITE, "eager, mb4", 24, OUT)
    left = turns_of(SUITE, (None, 24), "peers", tmp_path)
    assert [(turn.row, turn.budgets) for turn in left] == [("eager, mb16", (24,))]
    put(path, SUITE, "eager, mb16", 24, OUT)
    assert turns_of(SUITE, (None, 24), "peers", tmp_path) == []


def test_a_peer_has_the_place_it_is_thought_to_need(tmp_path: Path) -> None:
    save(frontier.places_path(tmp_path, SUITE), {"eager, mb4": 20 * GIB})
    turns = turns_of(SUITE, (None,), "peers", tmp_path)
    assert {turn.row: turn.place for turn in turns} == {
        "eager, mb16": ROOM,
        "eager, mb4": 20 * GIB,
    }


def test_what_was_not_installed_is_tried_again() -> None:
    document = {"rows": {"Liger": {"24": {"status": "not installed"}, "40": OUT}}}
    assert missing(document, "Liger", (40, 24)) == [24]
    assert follows({"40": {"status": "not installed"}}, 24) is None


def test_a_peer_that_is_not_installed_has_no_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    suite = SUITES["llama-3.2-1b"]
    turns = turns_of(suite, (None,), "peers", tmp_path)
    assert not any("Liger" in turn.row for turn in turns)
    rows = json.loads(results_path(tmp_path, suite).read_text())["rows"]
    assert rows["Liger kernels, mb4"] == {"unlimited": {"status": "not installed"}}


def test_a_refused_budget_needs_no_run(tmp_path: Path) -> None:
    refusal = {"status": "does not fit", "smallest": 18 * GIB, "error": "no plan fits"}
    for budget, answer in ((16, refusal), (24, {"predicted": {"high": 23 * GIB}})):
        path = plan_path(tmp_path, SUITE, budget)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(answer))
    turns = turns_of(SUITE, (40, 24, 16), "oomph", tmp_path)
    assert turns == [Turn(suite=SUITE, row=OOMPH, budgets=(24,), place=24 * GIB)]
    rows = json.loads(results_path(tmp_path, SUITE).read_text())["rows"]
    assert rows == {OOMPH: {"16": refusal}}


# -- rows, with a tiny model on the CPU in the place of a large one on a card ----------------------


@pytest.fixture
def caps(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The budgets that were set, in bytes; nothing below 30 GiB is enough."""
    seen: list[int | None] = []

    def begin(training: Training, budget: int | None) -> None:
        seen.append(budget)
        if budget is not None and budget < 30 * GIB:
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Suite, "job", lambda suite: tiny_job())
    monkeypatch.setattr(frontier, "set_up", functools.partial(set_up, device="cpu"))
    monkeypatch.setattr(frontier, "begin", begin)
    monkeypatch.setattr(frontier, "clock", lambda step, count: float(step() > 0))
    peaks = {"allocated": 35 * GIB, "reserved": 50 * GIB, "retries": 0}
    monkeypatch.setattr(frontier, "peaks", lambda: peaks)
    return seen


class Nobody(Seat):
    """Beside nobody."""

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        yield


SEAT = Nobody(pipe=None)  # type: ignore[arg-type]


def test_a_peer_runs_only_where_the_outcome_is_not_known(caps: list[int | None]) -> None:
    found = frontier.run_peer(SUITE, SUITE.peers[1], (None, 64, 40, 36, 24, 16), {}, SEAT)
    cells = dict(found)
    assert caps == [None, 40 * GIB, 36 * GIB]
    statuses = {budget: (cell["status"], "copied" in cell) for budget, cell in cells.items()}
    assert statuses == {
        None: ("ok", False),
        64: ("ok", True),
        40: ("ok", False),
        36: ("ok", False),
        24: ("out of memory", True),
        16: ("out of memory", True),
    }
    assert cells[None]["rate"] == SUITE.items
    assert len(cells[None]["losses"]) == 2


def test_a_peer_that_ran_before_knows_what_it_found(caps: list[int | None]) -> None:
    found = frontier.run_peer(SUITE, SUITE.peers[1], (24,), {"40": OUT}, SEAT)
    assert dict(found) == {24: {**OUT, "copied": True}}
    assert caps == []


def test_running_out_of_a_place_is_not_running_out_of_a_budget(caps: list[int | None]) -> None:
    peer = SUITE.peers[1]
    crowded = frontier.run_peer(SUITE, peer, (None, 20), {}, SEAT, 25 * GIB)
    assert dict(crowded) == {None: {"status": CROWDED}}
    held = frontier.run_peer(SUITE, peer, (20,), {}, SEAT, 25 * GIB)
    assert dict(held) == {20: OUT}
    assert caps == [25 * GIB, 20 * GIB]


def test_oomph_runs_its_plan_and_keeps_what_was_promised(caps: list[int | None]) -> None:
    plan = make_plan(tiny_job(), budget=GIB)
    cells: dict[str, Any] = {}
    for budget in (None, 64, 40):
        found = frontier.run_oomph(SUITE, plan, budget, cells, SEAT)
        cells |= {frontier.key(at): cell for at, cell in found}
    # The plan for 64 GiB is the one that was run without a limit, and never reserved more.
    assert caps == [None, 40 * GIB]
    assert [cell["status"] for cell in cells.values()] == ["ok", "ok", "ok"]
    assert cells["64"]["copied"]
    assert cells["40"]["predicted"]["peak"] == plan.predicted.peak.as_dict()
    assert cells["40"]["choices"] == plan.choices.as_dict()
    assert len(cells["40"]["losses"]) == 3


# -- turns -----------------------------------------------------------------------------------------


def take(tmp_path: Path, *, seconds: float = 60) -> dict[str, Any]:
    turns = turns_of(SUITE, (None, 24), "peers", tmp_path)
    take_turns(turns, tmp_path, time.monotonic() + seconds)
    path = results_path(tmp_path, SUITE)
    return dict(json.loads(path.read_text())["rows"]) if path.exists() else {}


def pretend_rows(monkeypatch: pytest.MonkeyPatch, row: Any) -> None:
    monkeypatch.setattr(frontier, "run_row", row)
    monkeypatch.setattr(frontier, "environment", dict)


def test_what_rows_find_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(turn: Turn, out: Path, seat: Seat) -> Found:
        yield from ((budget, ok(1.0)) for budget in turn.budgets)

    pretend_rows(monkeypatch, row)
    both = {"unlimited": ok(1.0), "24": ok(1.0)}
    assert take(tmp_path) == {"eager, mb16": both, "eager, mb4": both}


def test_a_row_that_found_its_place_too_small_has_another_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(turn: Turn, out: Path, seat: Seat) -> Found:
        if turn.place == ROOM:
            yield from ((budget, ok(1.0)) for budget in turn.budgets)
        else:
            yield turn.budgets[0], OUT
            yield turn.budgets[1], {"status": CROWDED}

    save(frontier.places_path(tmp_path, SUITE), {"eager, mb4": 20 * GIB})
    pretend_rows(monkeypatch, row)
    assert take(tmp_path)["eager, mb4"] == {"unlimited": OUT, "24": ok(1.0)}


def test_a_row_that_takes_too_long_timed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(turn: Turn, out: Path, seat: Seat) -> Found:
        yield None, ok(1.0)
        time.sleep(60)

    monkeypatch.setattr(frontier, "PATIENCE_S", 0.5)
    pretend_rows(monkeypatch, row)
    cells = {"unlimited": ok(1.0), "24": {"status": "timed out"}}
    assert take(tmp_path) == {"eager, mb16": cells, "eager, mb4": cells}


def test_a_row_whose_process_dies_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_rows(monkeypatch, lambda turn, out, seat: os._exit(3))
    rows = take(tmp_path)
    assert {cell["status"] for cells in rows.values() for cell in cells.values()} == {"failed"}
    assert "3" in rows["eager, mb4"]["24"]["error"]


def test_the_time_limit_leaves_cells_for_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_rows(monkeypatch, lambda turn, out, seat: time.sleep(60))
    assert take(tmp_path, seconds=0.3) == {}


# -- tables ----------------------------------------------------------------------------------------


def test_ratios_are_to_the_fastest_peer_that_fits() -> None:
    document = made_up()
    assert fastest_peer(document, "24") == ("Liger, mb16", 45000.0)
    assert ratio(document, "24", "24") == pytest.approx(54 / 45)
    assert ratio(document, "24", "unlimited") == pytest.approx(54 / 60)
    assert ratio(document, "unlimited", "unlimited") == pytest.approx(70 / 60)


def test_there_is_no_ratio_where_nobody_fits() -> None:
    document = made_up()
    assert fastest_peer(document, "16") is None
    assert ratio(document, "16", "unlimited") is None
    assert ratio(document, "24", "16") is None


def test_the_tables_say_what_each_reached_at_each_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "frontier.json"
    file.write_text(json.dumps(made_up()))
    main(["--table", str(file), str(file)])
    printed = capsys.readouterr().out
    assert printed.count("### llama-3.2-1b") == 2
    lines = printed.splitlines()
    expected = [
        "| tokens/s | 16 GiB | 24 GiB | no limit | peak GiB, no limit | reserved GiB |",
        "| --- | --- | --- | --- | --- | --- |",
        "| eager, mb16 | out of memory | out of memory | out of memory |  |  |",
        "| compile, mb16 | out of memory | out of memory | 60,000 | 49.00 | 50.00 |",
        "| Liger, mb16 | out of memory | 45,000 | 50,000 | 22.00 | 23.00 |",
        "| oomph | needs 18.0 GiB | 54,000 | 70,000 | 49.00 | 50.00 |",
        "",
        "| oomph | 16 GiB | 24 GiB | no limit |",
        "| --- | --- | --- | --- |",
        "| ÷ fastest peer that fits |  | 1.200 | 1.167 |",
        "| ÷ fastest peer, no limit |  | 0.900 | 1.167 |",
        "| fastest peer that fits | none | Liger, mb16 | compile, mb16 |",
    ]
    start = lines.index(expected[0])
    assert lines[start : start + len(expected)] == expected
    assert "| 24 GiB | 65,536 | 54,000 | 22.00 | 22.50 | 9.5 | compile: blocks |" in lines


def test_samples_have_a_digit_after_the_point() -> None:
    document = made_up() | {"counts": "samples"}
    assert "| 60,000.0 |" in render(document)


def test_an_unknown_suite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--suite", "no-such-suite", "--out", str(tmp_path)])
