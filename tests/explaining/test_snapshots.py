"""Memory snapshots: what they say, and that nothing in them is ever run."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import pickletools
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshot_maker import CACHE, LINEAR, alloc, block, dump, free, segment, small_snapshot

from oomph.errors import BadInput
from oomph.explaining import plain_pickle
from oomph.explaining.plain_pickle import read_plain_pickle
from oomph.explaining.snapshots import NO_STACK, parse_snapshot, read_snapshot
from oomph.units import MIB


def keep(item, swap):
    return item


# --- what a snapshot says -------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_snapshot_is_added_up(tmp_path, protocol) -> None:
    snapshot = read_snapshot(dump(small_snapshot(), tmp_path / "s.pickle", protocol))
    assert snapshot.allocated == 40 * MIB
    assert snapshot.reserved == 148 * MIB
    assert snapshot.unused == 108 * MIB
    assert (snapshot.unused_blocks, snapshot.largest_unused) == (2, 100 * MIB)
    assert snapshot.segments == 2
    assert snapshot.peak == 140 * MIB
    assert snapshot.events == 7
    assert snapshot.sites == {"project/train.py:17 remember": 40 * MIB}
    assert snapshot.sites_at_peak == {
        "project/train.py:17 remember": 80 * MIB,
        "project/train.py:41 step": 60 * MIB,
    }


def test_what_was_there_before_recording_counts_for_the_peak() -> None:
    # 60 MiB from before are freed, after 10 more were taken.
    events = [alloc(5, 10 * MIB, CACHE), *free(9, 60 * MIB, LINEAR)]
    value = {
        "segments": [segment(block(10 * MIB, "active_allocated", CACHE))],
        "device_traces": [events],
    }
    assert parse_snapshot(io.BytesIO(pickle.dumps(value))).peak == 70 * MIB


def test_a_refused_request_is_noted() -> None:
    value = small_snapshot()
    value["device_traces"][0].append(
        {"action": "oom", "size": 500 * MIB, "device_free": 3 * MIB, "frames": LINEAR}
    )
    (oom,) = parse_snapshot(io.BytesIO(pickle.dumps(value))).ooms
    assert (oom.asked, oom.free) == (500 * MIB, 3 * MIB)


def test_a_snapshot_without_stacks_says_so() -> None:
    value = {"segments": [segment(block(MIB, "active_allocated", []))], "device_traces": []}
    assert parse_snapshot(io.BytesIO(pickle.dumps(value))).sites == {NO_STACK: MIB}


def test_an_empty_snapshot_is_a_snapshot() -> None:
    snapshot = parse_snapshot(io.BytesIO(pickle.dumps({"segments": [], "device_traces": [[]]})))
    assert (snapshot.allocated, snapshot.peak, snapshot.events) == (0, 0, 0)


def test_memory_does_not_grow_with_the_events(tmp_path, monkeypatch) -> None:
    """More events take hardly more memory than their references, four bytes each."""
    monkeypatch.setattr(plain_pickle, "CHUNK", 1 << 16)

    def peak_of(count: int) -> int:
        events = []
        for at in range(count):
            stack = [*LINEAR]  # a list of its own for each, as PyTorch makes it
            events += [alloc(at, MIB, stack), *free(at, MIB, stack)]
        path = dump({"segments": [], "device_traces": [events]}, tmp_path / "s.pickle")
        del events
        tracemalloc.start()
        read_snapshot(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    # Three events and a stack are four references.
    assert peak_of(3000) - peak_of(1000) < 2000 * 64


# --- plain values ---------------------------------------------------------------------------------

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(max_size=5), inner, max_size=5)
        | st.tuples(inner, inner)
    ),
    max_leaves=30,
)


@given(plain, st.integers(3, 5))
def test_plain_values_come_back_as_they_were(value, protocol) -> None:
    data = pickle.dumps(value, protocol)
    assert read_plain_pickle(io.BytesIO(data), keep) == value


@given(plain, st.data())
def test_a_pickle_cut_short_is_refused(value, data) -> None:
    whole = pickle.dumps(value, 4)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(BadInput):
        read_plain_pickle(io.BytesIO(whole[:cut]), keep)


@given(st.binary(max_size=200))
def test_noise_is_refused_or_plain(noise) -> None:
    with contextlib.suppress(BadInput):
        read_plain_pickle(io.BytesIO(noise), keep)


@pytest.mark.parametrize("chunk", [512, 1000, 4096])
def test_words_that_cross_the_buffers_edge_are_whole(monkeypatch, chunk) -> None:
    monkeypatch.setattr(plain_pickle, "CHUNK", chunk)
    value = [["x" * size, size, "ü" * size] for size in range(0, 700, 7)]
    assert read_plain_pickle(io.BytesIO(pickle.dumps(value, 4)), keep) == value


# --- what is refused ------------------------------------------------------------------------------


class Evil:
    """Would make a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("protocol", range(6))
def test_code_is_refused_and_nothing_is_executed(tmp_path, protocol) -> None:
    target = tmp_path / "owned"
    value = {"segments": [], "device_traces": [[Evil(target)]]}
    path = dump(value, tmp_path / "evil.pickle", protocol)
    with pytest.raises(BadInput, match=r"refused|no pickle"):
        read_snapshot(path)
    assert not target.exists()
    pickle.loads(path.read_bytes())  # the file is as evil as it says
    assert target.exists()


def test_every_opcode_that_could_call_something_is_refused() -> None:
    harmless = {
        "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET",
        "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1",
        "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES",
        "BINBYTES8", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS",
        "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    }  # fmt: skip
    for opcode in pickletools.opcodes:
        if opcode.name in harmless:
            continue
        data = b"\x80\x04N" + opcode.code.encode("latin-1") + bytes(16)
        with pytest.raises(BadInput, match=r"run code|opcode"):
            read_plain_pickle(io.BytesIO(data), keep)


def test_a_word_that_claims_to_be_huge_is_refused_before_it_is_read() -> None:
    data = b"\x80\x04X" + (1 << 31).to_bytes(4, "little")
    with pytest.raises(BadInput, match="no memory snapshot"):
        read_plain_pickle(io.BytesIO(data), keep)


def test_values_without_end_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(plain_pickle, "MOST_KEPT", 10_000)
    monkeypatch.setattr(plain_pickle, "CHUNK", 4096)
    for value in (list(range(50_000)), {i: i for i in range(50_000)}, [[i] for i in range(50_000)]):
        with pytest.raises(BadInput, match="is it a memory snapshot"):
            read_plain_pickle(io.BytesIO(pickle.dumps(value, 4)), keep)


def test_references_that_skip_ahead_are_refused() -> None:
    with pytest.raises(BadInput, match="skips"):
        read_plain_pickle(io.BytesIO(b"\x80\x04]r\xff\xff\xff\xff."), keep)


def test_a_pickle_of_something_else_is_refused(tmp_path) -> None:
    with pytest.raises(BadInput, match="no memory snapshot"):
        read_snapshot(dump({"weights": [1, 2, 3]}, tmp_path / "other.pickle"))


def test_a_snapshot_whose_sizes_are_words_is_refused() -> None:
    value = {"segments": [{"total_size": "big", "blocks": []}], "device_traces": []}
    with pytest.raises(BadInput, match="not a number"):
        parse_snapshot(io.BytesIO(pickle.dumps(value)))


# --- files that would take all time, memory or stack ----------------------------------------------

MARK, EMPTY_LIST, EMPTY_DICT, STOP = b"(", b"]", b"}", b"."
HEAD = b"\x80\x04"


def refused(data: bytes, match: str) -> None:
    """At once, whoever asks and whatever is done with the answer."""
    with pytest.raises(BadInput, match=match):
        parse_snapshot(io.BytesIO(data))


def test_a_tuple_of_tuples_without_end_is_no_key() -> None:
    # Hashing it would overflow the stack of the process itself.
    deep = b")" + b"\x85" * 400_000
    refused(HEAD + EMPTY_DICT + deep + b"N" + b"s" + STOP, "more than 100 levels deep")
    refused(HEAD + EMPTY_DICT + b")" + b"\x85" * 9 + b"Ns" + STOP, "no word or number")


@pytest.mark.parametrize("nest", [b"]" * 200_000, b"(" * 200_000, b"(" + b"]" * 99_999 + b"e"])
def test_what_is_nested_without_end_is_refused(nest: bytes) -> None:
    refused(HEAD + nest + STOP, r"levels deep|cut short|do not fit|no memory snapshot")


def nested_lists(levels: int) -> bytes:
    return HEAD + b"]" * levels + b"a" * (levels - 1) + STOP


def test_lists_may_be_nested_as_deep_as_is_said_and_no_deeper() -> None:
    most = plain_pickle.DEEPEST
    assert pickle.loads(nested_lists(most))
    assert read_plain_pickle(io.BytesIO(nested_lists(most)), keep)
    refused(nested_lists(most + 1), "more than 100 levels deep")


def doubled(times: int) -> bytes:
    """A tuple of two tuples, each of the same two tuples, and so on: two to the power of times."""
    data = HEAD + b")\x94"
    for at in range(times):
        data += b"h" + bytes([at]) + b"h" + bytes([at]) + b"\x86\x94"
    return data


@pytest.mark.parametrize("times", [60, 90])
@pytest.mark.parametrize(
    "around",
    [
        (b"}", b"Ns."),  # as a key
        (b"}\x8c\x08segments", b"s."),  # as a value
        (b"]}(\x8c\x06action", b"\x8c\x04sizeK\x01ua."),  # as what an event did
        (b"]}(\x8c\x05stateK\x00\x8c\x04size", b"ua."),  # as a block's size
        (b"](\x8c\x01x", b"e."),
        (b"", b"."),
    ],
)
def test_a_value_that_doubles_is_refused_before_anybody_walks_it(times, around) -> None:
    before, after = around
    body = doubled(times).removeprefix(HEAD)
    # Its references count from its own beginning: nothing before it is remembered.
    refused(HEAD + before + body + after, "unfolds into more|no word or number|is no snapshot")


def test_a_list_that_doubles_is_refused() -> None:
    data = HEAD + b"]\x94"
    for at in range(40):
        data += b"](h" + bytes([at]) + b"h" + bytes([at]) + b"e\x94"
    refused(data + STOP, "unfolds into more")


def test_a_value_that_is_part_of_another_changes_no_more() -> None:
    inside_itself = HEAD + b"]\x94h\x00a."
    assert pickle.loads(inside_itself)[0][0][0] != 1
    refused(inside_itself, "part of another")
    refused(HEAD + b"]\x94](h\x00eh\x00K\x01a.", "part of another")


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04}(K\x01u.",  # a key without a value
        b"\x80\x04}(Nu.",
        b"\x80\x04](e.",
        b"\x80\x04.",
        b"\x80\x04s.",
        b"\x80\x04\x86.",
        b"\x80\x04h\x00.",
    ],
)
def test_eight_bytes_are_refused_in_words(data: bytes) -> None:
    refused(data, r"do not fit|cut short|no memory snapshot")


@pytest.mark.parametrize("field", ["size", "addr", "line", "filename", "action", "name"])
@pytest.mark.parametrize("value", [None, [], {}, 1.5, (1,), 2**70, -(2**70), b"x", True])
def test_a_field_of_another_kind_is_refused_by_name(field: str, value: object) -> None:
    stack = [{"filename": "a.py", "line": 1, "name": "f"}]
    event = {"action": "alloc", "addr": 1, "size": 1, "stream": 0, "frames": stack}
    (stack[0] if field in stack[0] else event)[field] = value
    data = pickle.dumps({"segments": [], "device_traces": [[event]]})
    with pytest.raises(BadInput, match=field):
        parse_snapshot(io.BytesIO(data))


def test_words_of_a_file_are_never_taken_for_a_line_of_code() -> None:
    event = {"action": "alloc", "addr": 1, "size": 1, "frames": "\x1b[2J" * 100}
    data = pickle.dumps({"segments": [], "device_traces": [[event]]})
    assert list(parse_snapshot(io.BytesIO(data)).sites_at_peak) == [NO_STACK]


def test_names_in_a_snapshot_move_no_cursor() -> None:
    stack = [{"filename": "/a/b\x1b[2J.py", "line": 1, "name": "f\u202eg" * 300}]
    event = {"action": "alloc", "addr": 1, "size": 1, "frames": stack}
    data = pickle.dumps({"segments": [], "device_traces": [[event]]})
    (site,) = parse_snapshot(io.BytesIO(data)).sites_at_peak
    assert site.isprintable() and len(site) <= 300


def test_long_words_are_counted_together(monkeypatch) -> None:
    monkeypatch.setattr(plain_pickle, "MOST_TEXT", 10_000)
    with pytest.raises(BadInput, match="too many long words"):
        read_plain_pickle(io.BytesIO(pickle.dumps(["x" * 600 + str(i) for i in range(20)])), keep)
