"""The benchmark of CUDA graphs: what it compares, and how it says it."""

from __future__ import annotations

from benchmarks.graphs import choices_of, render
from oomph.jobs.sources import job_from_name


def test_both_ways_differ_in_nothing_but_the_graph() -> None:
    job = job_from_name("gpt2", batch=4, seq=64, precision="bf16-mixed", optimizer="adamw-fused")
    plain, graph = (choices_of(job, 2, compiled=True, graph=on).as_dict() for on in (False, True))
    assert len(plain["blocks"]) == 12
    assert {name for name in plain if plain[name] != graph[name]} == {"techniques"}
    assert graph["techniques"].keys() - plain["techniques"].keys() == {"cuda_graph"}


def test_the_ratio_is_of_the_two_times() -> None:
    one = {"seconds": 0.2, "losses": [1.0], "allocated": 3 << 30}
    row = {"job": "gpt2", "compiled": True, "plain": one, "graph": {**one, "seconds": 0.05}}
    assert "| 200.0 | 50.0 | 4.00 | 3.00 | 2.00 |" in render([{**row, "predicted": 2 << 30}])
