"""Exports: each is read back, or held against the program it is for."""

from __future__ import annotations

import bisect
import csv
import io
import itertools
import json
import pickle
import pickletools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from recorded import random_timeline, small_estimate
from torch.cuda import _memory_viz

from oomph.errors import BadInput
from oomph.rehearsal.allocator import AllocatorSettings
from oomph.report.exports.formats import FORMATS, export_of, save_export
from oomph.report.exports.memory_viz import memory_viz_pickle, snapshot_of
from oomph.report.exports.plain import blocks_csv, timeline_from_json, timeline_json
from oomph.report.exports.trace_events import trace_events_json
from oomph.report.history import History, history_of
from oomph.report.page.samples import take_samples

#: What the unpickler of PyTorch's page knows.
PAGE_OPCODES = {
    *("APPEND", "APPENDS", "BINGET", "BINFLOAT", "BININT", "BININT1", "BININT2", "BINPUT"),
    *("BINUNICODE", "DICT", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1"),
    *("LONG_BINGET", "LONG_BINPUT", "MARK", "MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO"),
    *("SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}
EXPANDABLE = "expandable_segments:True"


class Plain(pickle.Unpickler):
    """Reads nothing but plain values."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not plain")


class Ranges:
    """Addresses, as the places where they begin and end."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self.edges: list[int] = []
        for address, size in ranges:
            self.add(address, size)

    def hold(self, address: int, size: int) -> bool:
        first, last = (bisect.bisect_right(self.edges, at) for at in (address, address + size - 1))
        return first == last and first % 2 == 1

    def remove(self, address: int, size: int) -> None:
        assert self.hold(address, size)
        self._toggle(address, size)

    def add(self, address: int, size: int) -> None:
        places = [bisect.bisect_right(self.edges, at) for at in (address, address + size - 1)]
        assert places[0] == places[1] and places[0] % 2 == 0
        self._toggle(address, size)

    def _toggle(self, address: int, size: int) -> None:
        for edge in (address, address + size):
            if edge in self.edges:
                self.edges.remove(edge)  # a neighbour ends or begins there
            else:
                bisect.insort(self.edges, edge)


def history(allocator: str = "") -> History:
    return history_of(small_estimate("rtx-4090", allocator))


def large_history(allocator: str = "") -> History:
    """With a cache that is emptied twice."""
    timeline = random_timeline(6000)
    timeline.emptied += [1500, 4100]
    return History(timeline=timeline, settings=AllocatorSettings.parse(allocator))


@pytest.fixture(scope="module", params=["", EXPANDABLE])
def snapshot(request: pytest.FixtureRequest) -> dict[str, Any]:
    return Plain(io.BytesIO(memory_viz_pickle(large_history(request.param)))).load()


# -- memory_viz ---------------------------------------------------------------------------------


def test_the_pickle_holds_only_what_pytorchs_page_can_read() -> None:
    used = {opcode.name for opcode, _, _ in pickletools.genops(memory_viz_pickle(history()))}
    assert used <= PAGE_OPCODES


def test_the_pickle_is_the_snapshot(snapshot: dict[str, Any]) -> None:
    settings = snapshot["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"]
    assert snapshot == snapshot_of(large_history(settings))


@pytest.mark.parametrize("allocator", ["", EXPANDABLE])
def test_pytorchs_own_tools_take_the_snapshot(allocator: str) -> None:
    taken = snapshot_of(history(allocator))
    assert f"segments: {len(taken['segments'])}" in _memory_viz.segsum(taken)
    allocations = re.findall(r"^\w+ = \w+\[", _memory_viz.trace(taken), re.MULTILINE)
    assert len(allocations) == sum(block.size > 0 for block in history().timeline.blocks)
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "snapshot.pickle" in plot(taken)
    lines = _memory_viz.memory(taken, format_flamegraph=str)
    assert "active_allocated" in lines


def test_undone_from_the_end_the_trace_leaves_nothing(snapshot: dict[str, Any]) -> None:
    """As the page goes back in time from the segments there are at the end."""
    segments = Ranges((s["address"], s["total_size"]) for s in snapshot["segments"])
    blocks = {
        block["address"]: block["requested_size"]
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    for entry in reversed(snapshot["device_traces"][0]):
        address, size = entry["addr"], entry["size"]
        match entry["action"]:
            case "alloc":
                assert blocks.pop(address) == size
                assert segments.hold(address, size)
            case "free_completed":
                blocks[address] = size
            case "free_requested":
                assert blocks[address] == size
            case "segment_alloc" | "segment_map":
                segments.remove(address, size)
            case "segment_free" | "segment_unmap":
                segments.add(address, size)
            case action:
                assert action == "snapshot"
    assert blocks == {}
    assert segments.edges == []


def test_an_emptied_cache_is_in_the_trace(snapshot: dict[str, Any]) -> None:
    expandable = snapshot["allocator_settings"]["expandable_segments"]
    wanted = "segment_unmap" if expandable else "segment_free"
    times = {e["time_us"] for e in snapshot["device_traces"][0] if e["action"] == wanted}
    assert times == {1500, 4100}


def test_the_trace_reaches_the_estimates_peak() -> None:
    estimate = small_estimate()
    sizes: dict[int, int] = {}
    highest = 0
    for entry in snapshot_of(history())["device_traces"][0]:
        if entry["action"] == "alloc":
            sizes[entry["addr"]] = -(-entry["size"] // 512) * 512
        elif entry["action"] == "free_completed":
            del sizes[entry["addr"]]
        highest = max(highest, sum(sizes.values()))
    assert highest == estimate.peak.allocated


def test_all_that_is_reserved_is_in_segments() -> None:
    taken = snapshot_of(history())
    assert sum(s["total_size"] for s in taken["segments"]) == small_estimate().peak.reserved
    for segment in taken["segments"]:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        addresses = [block["address"] for block in segment["blocks"]]
        sizes = [block["size"] for block in segment["blocks"]]
        assert addresses == [
            segment["address"] + at for at in itertools.accumulate([0, *sizes[:-1]])
        ]


def test_entries_have_categories_and_one_that_is_unknown() -> None:
    trace = snapshot_of(history())["device_traces"][0]
    categories = {entry["category"] for entry in trace}
    expected = {str(b.category) for b in history().timeline.blocks if b.size}
    assert categories == expected | {"unknown"}


def test_frames_name_op_and_module() -> None:
    trace = snapshot_of(history())["device_traces"][0]
    frames = [entry["frames"][0] for entry in trace if entry["action"] == "alloc"]
    named = {(frame["name"], frame["filename"]) for frame in frames}
    assert ("aten.addmm.default", "layers.1") in named


def test_there_is_no_snapshot_of_the_cpu() -> None:
    with pytest.raises(BadInput, match="rehearse for a GPU"):
        snapshot_of(history_of(small_estimate(None)))


# -- trace events -------------------------------------------------------------------------------


def counters(events: list[dict[str, Any]], at: int) -> dict[str, int]:
    """What each counter shows right after an event."""
    told = [event for event in events if event["ph"] == "C" and event["ts"] <= at]
    return {event["name"]: event["args"]["bytes"] for event in told}


def test_counters_show_the_categories_and_ledgers() -> None:
    estimate = small_estimate()
    events = json.loads(trace_events_json(history()))["traceEvents"]
    samples = take_samples(history())
    for place in range(0, len(samples.events), 37):
        at = int(samples.events[place])
        shown = counters(events, at)
        ledgers = {name: shown.pop(name) for name in ("allocated", "reserved", "device")}
        assert shown == samples.at(at)
        assert ledgers["allocated"] == samples.allocated[place]
        assert ledgers["reserved"] == samples.reserved[place]
    most = max(e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == "device")
    assert most == estimate.peak.device


def test_trace_events_have_the_fields_that_perfetto_wants() -> None:
    events = json.loads(trace_events_json(history()))["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] > 0
            assert isinstance(event["tid"], int)
    times = [event["ts"] for event in events if event["ph"] == "C"]
    assert times == sorted(times)


def test_slices_are_the_phases_and_the_blocks_of_the_model() -> None:
    events = json.loads(trace_events_json(history()))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    spans = {(s.name, s.start, s.stop) for s in history().timeline.spans if s.stop > s.start}
    assert spans == {(s["name"], s["ts"], s["ts"] + s["dur"]) for s in slices if s["tid"] == 1}
    assert {s["name"] for s in slices if s["tid"] == 2} == {"forward", "backward", "optimizer"}
    assert {s["name"] for s in slices if s["tid"] == 3} == {"layers.0", "layers.1", "layers.2"}


def test_a_thread_of_slices_never_overlaps() -> None:
    events = json.loads(trace_events_json(large_history()))["traceEvents"]
    for thread in (1, 2, 3):
        slices = sorted(
            (e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == thread
        )
        for (start, length), (following, _) in itertools.pairwise(slices):
            assert start + length <= following


def test_the_cpu_has_no_ledger_but_allocated() -> None:
    events = json.loads(trace_events_json(history_of(small_estimate(None))))["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "C"}
    assert "allocated" in names
    assert not names & {"reserved", "device"}


# -- CSV and JSON -------------------------------------------------------------------------------


def test_the_csv_has_a_row_for_every_block() -> None:
    rows = list(csv.DictReader(io.StringIO(blocks_csv(history()).decode())))
    blocks = history().timeline.blocks
    assert len(rows) == len(blocks)
    for row, block in zip(rows, blocks, strict=True):
        assert int(row["size"]) == block.size
        assert int(row["birth"]) == block.birth
        assert (int(row["death"]) if row["death"] else None) == block.death
        assert (row["module"], row["op"], row["phase"]) == (block.module, block.op, block.phase)
        assert row["category"] == block.category


def test_the_timeline_comes_back_from_its_json() -> None:
    timeline = history().timeline
    assert timeline_from_json(timeline_json(history())) == timeline


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"kind": "oomph timeline"}',
        '{"kind": "oomph timeline", "schema_version": 99}',
        '{"kind": "oomph timeline", "schema_version": 1, "events": 1, "blocks": [[1]]}',
    ],
)
def test_what_is_no_timeline_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        timeline_from_json(text)


def test_half_a_timeline_is_refused() -> None:
    whole = timeline_json(history())
    with pytest.raises(BadInput, match="only part"):
        timeline_from_json(whole[: len(whole) // 2])


# -- names --------------------------------------------------------------------------------------


def test_the_longest_ending_decides() -> None:
    assert export_of("x.json") is timeline_json
    assert export_of("x.Perfetto.JSON") is trace_events_json
    assert export_of("x.trace.json") is trace_events_json
    assert export_of("perfetto.json") is timeline_json


def test_an_unknown_ending_is_refused_with_those_there_are() -> None:
    with pytest.raises(BadInput) as refused:
        export_of("memory.txt")
    assert all(ending in str(refused.value) for ending in FORMATS)


@pytest.mark.parametrize("ending", FORMATS)
def test_every_export_is_written(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"memory{ending}"
    save_export(history(), path)
    assert path.read_bytes() == FORMATS[ending](history())
