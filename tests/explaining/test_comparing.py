"""`oomph.compare`: peak by ledger, category and module, and when a change is a regression."""

from __future__ import annotations

import json

import pytest
import torch
from snapshot_maker import CACHE, block, dump, segment, small_snapshot
from torch import nn

import oomph
from oomph.errors import BadInput
from oomph.explaining.comparing import Difference, Threshold
from oomph.units import GIB, MIB


def job(width: int = 64) -> oomph.Job:
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    batch = torch.ones(512, width), torch.ones(512, width)
    return oomph.Job(model, nn.MSELoss(), "adamw", batch, name="tiny")


@pytest.fixture(scope="module")
def estimates() -> tuple[oomph.Estimate, oomph.Estimate]:
    small, large = (oomph.estimate(job(width), phases=("step",)) for width in (64, 256))
    return small, large


def test_two_estimates_are_compared_by_ledger_category_and_module(estimates) -> None:
    found = oomph.compare(*estimates)
    small, large = estimates
    assert {one.name: one.change for one in found.ledgers} == {
        name: large.peak.as_dict()[name] - size for name, size in small.peak.as_dict().items()
    }
    changes = {one.name: one.change for one in found.categories}
    assert changes["parameter"] == 4 * 2 * (256 * 256 + 256 - 64 * 64 - 64)
    assert found.modules
    assert not found.regressed


def test_the_headline_names_the_largest_part_of_the_change(estimates) -> None:
    small, large = estimates
    found = oomph.compare(small, large)
    assert f"the largest part is {found.categories[0].name} (+" in found.headline
    assert "the largest part" not in oomph.compare(small, small).headline


def test_the_largest_changes_come_first(estimates) -> None:
    sizes = [abs(one.change) for one in oomph.compare(*estimates).categories]
    assert sizes == sorted(sizes, reverse=True)


def test_files_and_results_compare_alike(estimates, tmp_path) -> None:
    small, large = estimates
    path = tmp_path / "a.json"
    path.write_text(json.dumps(small.as_dict()))
    assert oomph.compare(path, large).ledgers == oomph.compare(small, large).ledgers


def test_a_file_does_not_differ_from_itself(estimates) -> None:
    found = oomph.compare(estimates[0], estimates[0], fail_above="0%")
    assert all(one.change == 0 for one in (*found.ledgers, *found.categories, *found.modules))
    assert not found.regressed


def test_snapshots_are_compared_by_line(tmp_path) -> None:
    grown = small_snapshot()
    grown["segments"].append(segment(block(64 * MIB, "active_allocated", CACHE)))
    before = dump(small_snapshot(), tmp_path / "a.pickle")
    found = oomph.compare(before, dump(grown, tmp_path / "b.pickle"), fail_above="10%")
    assert found.decisive.name == "reserved"
    assert found.decisive.change == 64 * MIB
    assert found.regressed


def test_a_prediction_and_a_measurement_are_compared_with_a_word(estimates, tmp_path) -> None:
    snapshot = dump(small_snapshot(), tmp_path / "s.pickle")
    found = oomph.compare(estimates[0], snapshot)
    assert {one.name for one in found.ledgers} == {"allocated", "reserved"}
    assert any("predicted" in note for note in found.notes)


def test_other_cards_and_versions_are_named(estimates) -> None:
    on_a_card = oomph.estimate(job(), gpu="t4", phases=("step",))
    other = oomph.estimate(job(), gpu="h200", phases=("step",))
    assert "gpu: t4 → h200" in oomph.compare(on_a_card, other).notes


@pytest.mark.parametrize(
    ("threshold", "after", "exceeded"),
    [
        ("2%", 102, False),
        ("2%", 103, True),
        ("2%", 50, False),
        ("0%", 101, True),
        ("0", 101, True),
        ("5B", 105, False),
        ("5B", 106, True),
        ("1GiB", 100 + GIB + 1, True),
    ],
)
def test_what_is_above_a_threshold(threshold, after, exceeded) -> None:
    difference = Difference(name="device", before=100, after=after)
    assert Threshold.parse(threshold).is_exceeded(difference) is exceeded


@pytest.mark.parametrize("text", ["", "two", "-1%", "nan%", "%", "-5MiB", "inf%"])
def test_a_threshold_that_cannot_be_meant_is_refused(text) -> None:
    with pytest.raises(BadInput):
        Threshold.parse(text)


def test_what_shares_no_ledger_cannot_be_compared(tmp_path) -> None:
    values = {"job": "big", "gpu": None, "smallest_budget": 5, "reason": "none"}
    no_plan = tmp_path / "n.json"
    no_plan.write_text(json.dumps(values))
    with pytest.raises(BadInput, match="nothing to compare"):
        oomph.compare(no_plan, dump(small_snapshot(), tmp_path / "s.pickle"))
