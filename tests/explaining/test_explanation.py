"""`oomph.explain`: the first line is the answer, whatever wrote the file."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
import torch
from snapshot_maker import LINEAR, block, dump, segment, small_snapshot
from torch import nn

import oomph
from oomph.errors import BadInput
from oomph.explaining import explanation, traces
from oomph.units import MIB


@pytest.fixture(scope="module")
def job() -> oomph.Job:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
    batch = torch.ones(512, 64), torch.ones(512, 64)
    return oomph.Job(model, nn.MSELoss(), "adamw", batch, name="tiny")


def write(values, path):
    path.write_text(json.dumps(values))
    return path


def memory_event(time, allocated, *, asked=MIB, device=1, reserved=None):
    return {
        "ph": "i",
        "name": "[memory]",
        "tid": 7,
        "ts": time,
        "args": {
            "Device Type": device,
            "Device Id": 0,
            "Bytes": asked,
            "Total Allocated": allocated,
            "Total Reserved": reserved or 2 * allocated,
        },
    }


def span(name, start, length, thread=7):
    return {"ph": "X", "name": name, "tid": thread, "ts": start, "dur": length}


TRACE = {
    "schemaVersion": 1,
    "traceEvents": [
        span("aten::addmm", 190, 20),
        memory_event(100, 10 * MIB),
        memory_event(200, 90 * MIB, asked=80 * MIB),
        memory_event(300, 20 * MIB, asked=-70 * MIB),
        memory_event(150, 900 * MIB, device=0),
        span("nn.Module: Block_0", 120, 150),
        span("aten::relu on another thread", 195, 10, thread=8),
    ],
    "traceName": "trace.json",
}


# --- reports of oomph -----------------------------------------------------------------------------


def test_an_estimate_says_what_it_needs_and_where(job, tmp_path) -> None:
    estimate = oomph.estimate(job, gpu="t4", phases=("step",))
    found = oomph.explain(write(estimate.as_dict(), tmp_path / "e.json"))
    assert (found.kind, found.predicted) == ("estimate", True)
    assert found.headline.startswith("fits: tiny needs ")
    assert found.ledgers == estimate.peak.as_dict()
    assert found.categories == estimate.categories_at_peak
    assert str(found).startswith(found.headline)


def test_a_plan_says_what_it_changes(job, tmp_path) -> None:
    plan = oomph.plan(job, budget="2MiB")
    found = oomph.explain(write(plan.as_dict(), tmp_path / "p.json"))
    assert found.kind == "plan"
    assert found.ledgers == plan.predicted.peak.as_dict()
    assert len(found.advice) == len(plan.changes) > 0


def test_that_there_is_no_plan_is_explained_too(tmp_path) -> None:
    values = {
        "schema_version": 1,
        "job": "big",
        "gpu": "t4",
        "verdict": "does_not_fit",
        "budget": 10,
        "smallest_budget": 3 * MIB,
        "reason": "no plan fits",
        "seconds": 1.0,
    }
    found = oomph.explain(write(values, tmp_path / "n.json"))
    assert found.headline == "does not fit: big on t4; no plan fits"
    assert found.ledgers == {"device": 3 * MIB}


def test_a_training_holds_measured_against_predicted(job, tmp_path) -> None:
    plan = oomph.plan(job, budget="8MiB").as_dict()
    predicted = plan["predicted"]["peak"]
    measured = {name: 2 * size for name, size in predicted.items()}
    values = {
        "plan": plan,
        "job": "tiny",
        "steps": 3,
        "predicted": {"peak": predicted},
        "measured": {"peak": measured},
    }
    found = oomph.explain(write(values, tmp_path / "t.json"))
    assert (found.kind, found.predicted) == ("training", False)
    assert "+100.0% of the prediction" in found.headline
    assert found.ledgers == measured


@pytest.mark.parametrize("lost", ["peak", "peak_at", "modules_at_peak", "gpu"])
def test_an_estimate_with_a_part_missing_is_refused(job, tmp_path, lost) -> None:
    values = oomph.estimate(job, phases=("build",)).as_dict()
    del values[lost]
    with pytest.raises(BadInput, match=r"changed into something else|no report of oomph"):
        oomph.explain(write(values, tmp_path / "e.json"))


def test_a_file_of_an_error_is_refused_with_it(tmp_path) -> None:
    path = write({"schema_version": 1, "error": "unknown model 'x'"}, tmp_path / "error.json")
    with pytest.raises(BadInput, match="unknown model 'x'"):
        oomph.explain(path)


# --- snapshots ------------------------------------------------------------------------------------


def test_a_snapshot_names_the_line_that_took_most_at_the_peak(tmp_path) -> None:
    found = oomph.explain(dump(small_snapshot(), tmp_path / "s.pickle"))
    assert found.kind == "snapshot"
    assert found.headline.startswith("the peak was 140.0 MiB allocated")
    assert "project/train.py:17 remember (80.00 MiB)" in found.headline
    assert "expandable_segments" in found.advice[0]


def test_a_snapshot_of_an_oom_tells_fragmentation_from_size(tmp_path) -> None:
    value = small_snapshot()
    oom = {"action": "oom", "size": 50 * MIB, "device_free": MIB, "frames": LINEAR}
    value["device_traces"][0].append(oom)
    fragmented = oomph.explain(dump(value, tmp_path / "f.pickle"))
    assert fragmented.headline.startswith("out of memory: 50.00 MiB asked for with 1.00 MiB free")
    assert "fragmented" in fragmented.headline
    oom["size"] = 500 * MIB
    assert "it does not fit" in oomph.explain(dump(value, tmp_path / "b.pickle")).headline


def test_an_empty_snapshot_is_called_empty(tmp_path) -> None:
    path = dump({"segments": [], "device_traces": []}, tmp_path / "empty.pickle")
    assert "empty" in oomph.explain(path).headline


def test_a_snapshot_without_stacks_says_how_to_record_them(tmp_path) -> None:
    value = {"segments": [segment(block(MIB, "active_allocated", []))], "device_traces": []}
    found = oomph.explain(dump(value, tmp_path / "s.pickle"))
    assert any("_record_memory_history" in sentence for sentence in found.advice)


# --- traces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("chunk", [64, 1 << 20])
def test_a_trace_says_when_and_in_what_the_gpu_had_its_peak(
    tmp_path, monkeypatch, compressed, chunk
) -> None:
    monkeypatch.setattr(traces, "CHUNK", chunk)
    text = json.dumps(TRACE).encode()
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.compress(text) if compressed else text)
    found = oomph.explain(path)
    assert found.kind == "trace"
    assert found.headline.startswith("the peak on cuda:0 was 90.00 MiB allocated of 180.0 MiB")
    assert found.headline.endswith("in aten::addmm in nn.Module: Block_0")
    assert found.details["at_seconds"] == pytest.approx(100e-6)
    assert found.sites["aten::addmm"] == 80 * MIB


def test_a_trace_of_the_profiler_here_is_read(tmp_path) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        torch.ones(1024, 1024).mul(2)
    path = tmp_path / "trace.json"
    recorded.export_chrome_trace(str(path))
    found = oomph.explain(path)
    assert found.details["device"] == "cpu"
    assert found.ledgers["allocated"] >= 8 * MIB
    assert found.details["running"][0].startswith("aten::")


def test_a_trace_without_memory_events_says_how_to_record_them(tmp_path) -> None:
    path = write({"traceEvents": [span("aten::mm", 1, 2)]}, tmp_path / "t.json")
    with pytest.raises(BadInput, match="profile_memory=True"):
        oomph.explain(path)


@pytest.mark.parametrize("length", [60, 200, 500])
def test_a_trace_cut_short_is_refused(tmp_path, length) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(TRACE)[:length])
    with pytest.raises(BadInput, match=r"cut short|trace"):
        oomph.explain(path)


def test_a_compressed_trace_cut_short_is_refused(tmp_path) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(json.dumps(TRACE).encode())[:-20])
    with pytest.raises(BadInput):
        oomph.explain(path)


@pytest.mark.parametrize("pack", [lambda text: text, gzip.compress])
@pytest.mark.parametrize(
    ("event", "words"),
    [
        (memory_event("soon", MIB), "no number as its ts: 'soon'"),
        (memory_event([], MIB), "no number as its ts"),
        (memory_event(float("nan"), MIB), "no number as its ts"),
        (memory_event(1, float("inf")), "Total Allocated is inf"),
        (memory_event(1, 10**400), "lacks its numbers"),
        (memory_event(1, {"a": 1}, reserved=1), "lacks its numbers"),
        (memory_event(1, MIB, device="gpu"), "Device Type is 'gpu'"),
        (memory_event(1, 2**70), "lacks its numbers"),
        ({**memory_event(1, MIB), "args": [1]}, "lacks its numbers"),
        (span("aten::mm", "1e999", 2), "no number as its ts"),
        (span("aten::mm", 1, None), "no number as its dur"),
    ],
)
def test_an_event_whose_numbers_are_none_is_refused(tmp_path, event, words, pack) -> None:
    path = tmp_path / "t.json"
    values = {"traceEvents": [memory_event(0, MIB), event]}
    path.write_bytes(pack(json.dumps(values).encode()))
    with pytest.raises(BadInput, match=words):
        oomph.explain(path)


def test_names_and_threads_of_events_are_words_and_numbers_or_none(tmp_path) -> None:
    deep: Any = []
    for _ in range(200):
        deep = [deep]
    events = [{**memory_event(5, MIB), "tid": deep}, {**span(deep, 1, 9), "tid": deep}]
    events.append(span("aten::mm\x1b[2J" * 99, 1, 9))
    found = oomph.explain(write({"traceEvents": events}, tmp_path / "t.json"))
    assert all(name.isprintable() and len(name) <= 300 for name in found.details["running"])


def test_an_event_that_is_nested_without_end_is_refused(tmp_path) -> None:
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [' + "[" * 100_000)
    with pytest.raises(BadInput, match="nested too deep"):
        oomph.explain(path)


def test_what_is_packed_wrongly_is_refused(tmp_path) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(b"\x1f\x8b\x08\x00" + bytes(6) + b"\xff" * 50)
    with pytest.raises(BadInput, match="cannot read"):
        oomph.explain(path)


def test_what_unpacks_without_end_is_refused_before_it_did(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(traces, "_WORTH_A_LOOK", 1 << 20)
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (64 << 20)))
    with pytest.raises(BadInput, match="unpacks to far more"):
        oomph.explain(path)


def test_devices_without_end_are_refused(tmp_path) -> None:
    events = [memory_event(1, MIB, device=number) for number in range(3000)]
    with pytest.raises(BadInput, match="more than 1024 devices"):
        oomph.explain(write({"traceEvents": events}, tmp_path / "t.json"))


# --- reports that were edited ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("peak/device", "much", "peak.device cannot be 'much': a whole number"),
        ("peak/device", -1, "peak.device cannot be -1"),
        ("peak/device", 10**30, "peak.device cannot be"),
        ("peak_at", 3, "peak_at cannot be 3: an object belongs there"),
        ("categories_at_peak/x", 1.5, "categories_at_peak.x cannot be 1.5"),
        ("job", None, "job cannot be None: text belongs there"),
        ("budget", float("nan"), "budget cannot be nan"),
    ],
)
def test_an_edited_report_is_refused_with_the_field(job, tmp_path, path, value, words) -> None:
    values = oomph.estimate(job, gpu="t4", phases=("build",)).as_dict()
    at = values
    *parents, last = path.split("/")
    for parent in parents:
        at = at[parent]
    at[last] = value
    with pytest.raises(BadInput, match=words):
        oomph.explain(write(values, tmp_path / "e.json"))


# --- other files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"hello", "neither"),
        (b"PK\x03\x04rest", "torch.save"),
        (b'{"a": ', "no JSON"),
        (b'{"a": 1}', "no report of oomph"),
        (b"\x80\x04", "cut short"),
        (b"\x1f\x8bnoise", "cannot read"),
    ],
)
def test_other_files_are_refused_in_words(tmp_path, content, words) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=words):
        oomph.explain(path)


def test_a_file_that_is_not_there_is_refused(tmp_path) -> None:
    with pytest.raises(BadInput, match="cannot read"):
        oomph.explain(tmp_path / "missing.json")
    with pytest.raises(BadInput, match="cannot read"):
        oomph.explain(tmp_path)


def test_a_huge_json_is_not_read_into_memory(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(explanation, "LARGEST_JSON", 100)
    path = write({"filler": "x" * 200}, tmp_path / "big.json")
    with pytest.raises(BadInput, match="no trace events"):
        oomph.explain(path)
