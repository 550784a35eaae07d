"""The benchmark of feeding counts what it says it counts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from benchmarks.feeding import SMALL, compare, describe, make_lengths, real_tokens
from oomph.data.packed_rows import pack_row
from oomph.data.padding import pad_samples

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
        "padding_of_an_epoch": 0.5,
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
    result = compare(SMALL, ways, WAITING)
    assert [one["speed_up"] for one in result["ways"]] == [1.0, 2.5]
    assert result["losses_equal"]
    assert "0.4% with it" in describe(result)


def test_losses_that_differ_are_said_to() -> None:
    ways = [way("fixed", 100.0, 2.0), way("packed", 250.0, 2.1)]
    result = compare(dataclasses.replace(SMALL, device="cuda"), ways, WAITING)
    assert result["losses_apart"] == pytest.approx(0.05)
    assert "NOT equal" in describe(result)
