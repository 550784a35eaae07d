"""The offload benchmark, with a tiny model on the CPU in the place of a large one on a card."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import offload
from benchmarks.offload import CASES, PEERS, Case, Row, oomph_rows, plan_path, render, run_row
from benchmarks.plans import save
from benchmarks.real_steps import set_up
from oomph.jobs.job import Job
from oomph.search.planner import plan

GIB = 1 << 30


class TinyCase(Case):
    def job(self, *, clips: bool = True) -> Job:
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            use_cache=False,
        )
        tokens = torch.ones(4, 8, dtype=torch.long)
        batch = {"input_ids": tokens, "labels": tokens}
        build = functools.partial(LlamaForCausalLM, config)
        clip_norm = offload.CLIP_NORM if clips else None
        return Job(build, None, "adamw", batch, precision="fp32", clip_norm=clip_norm)


TINY = TinyCase(
    name="tiny",
    model="tiny",
    batch=4,
    seq=8,
    precision="fp32",
    budgets=(0.5,),
    clips=(False, True),
    on_host=False,
)


class NobodyElse:
    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        yield


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "set_up", functools.partial(set_up, device="cpu"))
    monkeypatch.setattr(offload, "begin", lambda training, budget: None)
    monkeypatch.setattr(offload, "clock", lambda step, count: float(step() > 0))
    taken = {"allocated": 2 << 30, "reserved": 3 << 30, "retries": 0}
    monkeypatch.setattr(offload, "peaks", lambda: taken)
    monkeypatch.setattr(offload, "environment", dict)
    monkeypatch.setattr(offload, "LEARNING_RATE", 1e-3)  # a step or two must be seen


def losses(row: Row) -> list[float]:
    cell = run_row(TINY, row, NobodyElse())  # type: ignore[arg-type]
    assert cell["status"] == "ok", cell
    assert cell["rate"] == 4 * 8
    return list(cell["losses"])


def plain(training: offload.Training) -> offload.Step:
    return offload.plain_step(training, training.optimizer, clip_norm=offload.CLIP_NORM)


def test_oomph_trains_the_same_model(tmp_path: Path) -> None:
    for clips in TINY.clips:
        made = plan(TINY.job(clips=clips), budget="512MiB")
        save(plan_path(tmp_path, TINY, 0.5, clips=clips), made.as_dict())
    unclipped, clipped = (losses(row) for row in oomph_rows(TINY, tmp_path))
    theirs = losses(Row(name="plain", make_step=plain))
    assert clipped == pytest.approx(theirs, rel=1e-5)
    assert unclipped != clipped
    assert clipped[0] != clipped[-1]


def test_rows_that_need_what_is_not_there_say_so(tmp_path: Path) -> None:
    row = Row(name="other", make_step=plain, needs=("no_such_package",))
    assert offload.tasks_of(TINY, [row], tmp_path) == []
    found = json.loads(offload.results_path(tmp_path, TINY).read_text())
    assert found["rows"]["other"] == {"status": offload.NOT_INSTALLED}


def test_what_was_run_is_not_run_again_but_for_what_was_not_installed(tmp_path: Path) -> None:
    offload.put(tmp_path, TINY, "done", {"status": "out of memory"})
    offload.put(tmp_path, TINY, "installed now", {"status": offload.NOT_INSTALLED})
    rows = [Row(name=name, make_step=plain) for name in ("done", "installed now", "new")]
    assert len(offload.tasks_of(TINY, rows, tmp_path)) == 2


def test_every_case_has_peers_and_plans_of_its_own(tmp_path: Path) -> None:
    assert PEERS.keys() == CASES.keys()
    paths = [
        plan_path(tmp_path, case, budget, clips=clips)
        for case, budget, clips in offload._rows_of_oomph(list(CASES.values()))
    ]
    assert len(set(paths)) == len(paths)


def test_a_table_says_speed_and_memory() -> None:
    rows: dict[str, Any] = {
        "fast": {"status": "ok", "rate": 20_000.4, "allocated": 11 * GIB, "reserved": 12 * GIB},
        "large": {"status": "out of memory"},
    }
    text = render({"job": "a job", "rows": rows})
    assert "| fast | 20,000 | 11.00 | 12.00 |" in text
    assert "| large | out of memory |  |  |" in text
