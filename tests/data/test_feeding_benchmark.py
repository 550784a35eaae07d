"""The benchmark of feeding counts what it says it counts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import feeding
from benchmarks.feeding import (
    SMALL,
    Sizes,
    Way,
    compare,
    describe,
    make_lengths,
    make_ways,
    read_sizes,
    real_tokens,
    run,
)
from oomph.data.packed_rows import pack_row
from oomph.data.padding import pad_samples
from oomph.errors import BadInput
from oomph.hardware import find_gpu

SIZES = Sizes(
    setting=SMALL,
    gpu=None,
    torch="2.11.0",
    rows=6,
    packed_rows=5,
    padded_bytes=1 << 24,
    packed_bytes=1 << 24,
    rehearsals=6,
    seconds=1.0,
)
WAITING = {
    "loader_seconds": 0.01,
    "step_seconds": 0.02,
    "waited_without": 0.33,
    "waited_with": 0.004,
}


def way(name: str, rate: float, loss: float) -> dict[str, Any]:
    return {
        "name": name,
        "worst_shape": (4, 128),
        "predicted_device_bytes": 1 << 30,
        "measured_reserved_bytes": None,
        "padding": 0.5,
        "tokens_per_second": rate,
        "loss_per_token": loss,
    }


def test_only_tokens_of_samples_count() -> None:
    samples = [torch.ones(3).long(), torch.ones(1).long(), torch.ones(5).long()]
    assert real_tokens(pad_samples(samples)) == 9
    rows = [pack_row(samples[:2], length=6), pack_row(samples[2:], length=6)]
    packed = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    # A sample of one token has nothing to learn, and looks like padding.
    assert real_tokens(packed) == 8


def test_lengths_are_skewed_and_within_their_bounds() -> None:
    lengths = make_lengths(SMALL)
    assert min(lengths) >= SMALL.shortest
    assert max(lengths) == SMALL.longest
    assert sum(lengths) / len(lengths) < SMALL.longest / 4


def test_ways_are_compared_with_the_first() -> None:
    ways = [way("fixed", 100.0, 2.0), way("packed", 250.0, 2.0)]
    result = compare(SIZES, ways, WAITING)
    assert [one["speed_up"] for one in result["ways"]] == [1.0, 2.5]
    assert result["losses_equal"]
    assert "0.4% with it" in describe(result)


def test_losses_that_differ_are_said_to() -> None:
    ways = [way("fixed", 100.0, 2.0), way("packed", 250.0, 2.1)]
    result = compare(SIZES, ways, WAITING)
    assert result["losses_apart"] == pytest.approx(0.05)
    assert "NOT equal" in describe(result)


def test_what_was_measured_so_far_can_be_shown() -> None:
    assert "equal" in describe(compare(SIZES, [], None))
    shown = describe(compare(SIZES, [way("fixed", 100.0, 2.0)], None))
    assert "fixed" in shown
    assert "a loader of" not in shown


def test_every_way_takes_all_samples_once_and_no_batch_is_larger_than_the_worst() -> None:
    everything = sum(make_lengths(SMALL))
    for one in make_ways(SIZES):
        batches = list(one.open(range(SMALL.samples)))
        assert sum(map(real_tokens, batches)) == everything, one.name
        assert one.worst["input_ids"].shape == (one.rows, SMALL.longest)
        largest = max(batch["input_ids"].numel() for batch in batches)
        assert largest <= one.worst["input_ids"].numel(), one.name


def saved_sizes(folder: Path) -> Path:
    path = folder / "sizes.json"
    path.write_text(json.dumps(dataclasses.asdict(SIZES)))
    return path


def test_sizes_come_back_from_their_file(tmp_path: Path) -> None:
    assert read_sizes(saved_sizes(tmp_path), SMALL, None) == SIZES


def test_sizes_of_another_setting_or_card_are_refused(tmp_path: Path) -> None:
    path = saved_sizes(tmp_path)
    with pytest.raises(BadInput, match="--only-sizes"):
        read_sizes(path, dataclasses.replace(SMALL, budget=1), None)
    with pytest.raises(BadInput, match=r"None, and this is h200"):
        read_sizes(path, SMALL, find_gpu("h200"))


def test_a_run_that_is_killed_keeps_the_stages_it_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure_one(_: Any, one: Way) -> dict[str, Any]:
        if one.name == "packed rows":
            raise KeyboardInterrupt
        return way(one.name, 100.0, 2.0)

    monkeypatch.setattr(feeding, "measure", measure_one)
    with pytest.raises(KeyboardInterrupt):
        run(SMALL, None, tmp_path, saved_sizes(tmp_path))
    kept = json.loads((tmp_path / "feeding.json").read_text())
    assert [one["name"] for one in kept["ways"]] == ["fixed size, padded", "by tokens"]
    assert kept["waiting"] is None
    begun = capsys.readouterr().out.splitlines()
    assert [line.split(" s  ")[1].split(",")[0] for line in begun] == [
        "fixed size",
        "by tokens",
        "packed rows",
    ]
