"""The offload benchmark, with a tiny model on the CPU in the place of a large one on a card."""

from __future__ import annotations

import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import offload
from benchmarks.offload import PEERS, Row, Settings, by_settings, oomph_rows, render, run_row
from benchmarks.real_steps import set_up
from oomph.job import Job
from oomph.techniques.host_optimizer import HostPlacement


def tiny_job() -> Job:
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
    return Job(build, None, "adamw", batch, precision="bf16", clip_norm=1.0)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "make_job", tiny_job)
    monkeypatch.setattr(offload, "set_up", functools.partial(set_up, device="cpu"))
    monkeypatch.setattr(offload, "begin", lambda training, budget: None)
    monkeypatch.setattr(offload, "clock", lambda step, count: float(step() > 0))
    monkeypatch.setattr(offload, "peaks", lambda: {"allocated": 2 << 30, "reserved": 3 << 30})
    monkeypatch.setattr(offload, "environment", dict)


def settings(**changes: Any) -> Settings:
    return Settings(loss_chunk=8, compiled=False, **changes)


def losses(step: offload.MakeStep) -> list[float]:
    cell = run_row(Row(name="one", make_step=step))
    assert cell["status"] == "ok", cell
    assert cell["rate"] == 4 * 8
    return list(cell["losses"])


def plain(training: offload.Training) -> offload.Step:
    return offload._plain_step(training, training.optimizer, clip_norm=1.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"placement": HostPlacement(bucket=1000, keep_gradients=0)},
        {"placement": HostPlacement(bucket=1000, host_share=1.0)},
        {"placement": HostPlacement(bucket=1000, host_share=0.5), "micro_batch": 2},
    ],
)
def test_oomph_trains_the_same_model(changes: dict[str, Any]) -> None:
    ours = losses(functools.partial(by_settings, settings(**changes)))
    theirs = losses(plain)
    assert ours[0] != ours[-1]
    assert ours == pytest.approx(theirs, rel=2e-2)


def test_rows_that_need_what_is_not_there_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Row, "is_installed", False)
    offload.run_missing(PEERS, tmp_path)
    rows = json.loads((tmp_path / "offload.json").read_text())["rows"]
    assert {cell["status"] for cell in rows.values()} == {"not installed"}
    assert len(rows) == len(PEERS)


def test_rows_run_once_each_in_a_process_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        begun.append(command[-1])
        if len(begun) == 1:
            offload.main(command[3:])
            return subprocess.CompletedProcess(command, 0)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", run)
    way = {"streamed": settings(placement=HostPlacement(bucket=1000))}
    monkeypatch.setattr(offload, "SETTINGS", {11.1: way, 8.0: way})
    for _ in range(2):
        offload.main(["--out", str(tmp_path), "--only", "oomph"])
    assert begun == ["oomph within 11.1 GiB, streamed", "oomph within 8 GiB, streamed"]
    rows = json.loads((tmp_path / "offload.json").read_text())["rows"]
    assert [cell["status"] for cell in rows.values()] == ["ok", "failed"]


def test_a_plan_takes_the_place_of_settings(tmp_path: Path) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "8.json").write_text("{}")
    names = [row.name for row in oomph_rows(tmp_path)]
    assert "oomph within 8 GiB, planned" in names
    assert not any("8 GiB, streamed" in name for name in names)
    assert any("11.1 GiB, streamed" in name for name in names)


def test_the_table_has_a_line_for_each() -> None:
    cell = {"status": "ok", "rate": 20200.0, "allocated": 10 << 30, "reserved": 11 << 30}
    rows = {"one": cell, "other": {"status": "not installed"}}
    lines = render({"job": "llama", "rows": rows}).splitlines()
    assert lines[-2:] == ["| one | 20,200 | 10.00 | 11.00 |", "| other | not installed |  |  |"]
