"""What was measured on an H200 beside what was aimed at, and beside what is predicted today."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.offload import CASES
from benchmarks.stored_choices import stored_choices
from oomph.hardware import find_gpu
from oomph.hardware.profile import Profile, save_profile
from oomph.hardware.timing.clock import Clock
from oomph.rehearsal.hidden import device_overhead
from oomph.rehearsal.phases import PHASES, rehearse
from oomph.rehearsal.step_cost import peak_allocated, step_cost
from oomph.units import GIB

TRUTH = Path(__file__).parents[2] / "benchmarks/truth"


def truth(name: str) -> dict[str, Any]:
    return dict(json.loads((TRUTH / f"h200-torch-2.11-{name}.json").read_text()))


def test_a_squeezed_run_lost_no_sample_and_kept_its_losses() -> None:
    elastic = truth("elastic")
    assert elastic["samples_lost"] == 0
    apart = [
        abs(one - other) / one for one, other in zip(*(elastic["losses"].values()), strict=True)
    ]
    assert max(apart) == elastic["losses_apart"] < 2e-4
    assert elastic["lost_outside_squeezes"] <= 0.03


def test_packed_rows_were_more_than_twice_as_fast_and_the_card_hardly_waited() -> None:
    feeding = truth("feeding")
    rates = {variant["name"]: variant["tokens_per_second"] for variant in feeding["ways"]}
    assert rates["packed rows"] >= 2 * rates["fixed size, padded"]
    assert feeding["losses_apart"] < 1e-5
    assert feeding["waiting"]["waited_with"] <= 0.02
    assert feeding["waiting"]["loader_seconds"] <= feeding["waiting"]["step_seconds"] / 2


def test_watching_cost_less_than_two_percent() -> None:
    overheads = {case["busy"]: case["overhead"] for case in truth("watch")["cases"]}
    assert overheads["card"]["high"] < 0.02
    # On a busy host the interval is wider than what it measures.
    assert overheads["host"]["median"] < 0.02 < overheads["host"]["high"]


OFFLOADED = [
    (case, name)
    for case in ("3b", "3b-again", "8b", "3b-disk")
    for name in truth(f"offload-{case}")["rows"]
    if name.startswith("oomph")
]


#: Steps whose seconds are predicted worse than to 10 %: by 12 % too few.
SECONDS_MISSED = {"oomph within 24 GiB, no clipping": 0.12}
#: Memory that is predicted worse than to 2 %: 3.1, 3.9 and 4.2 % too much, where the host steps a
#: part and was done with it sooner than was thought; and 2.2 % too little, as the host stepped the
#: norm behind the last block then, and the GPU does now: what was run again is held to 2 %.
MEMORY_MISSED = {
    ("3b", "oomph within 11.1 GiB, no clipping"): 0.04,
    ("3b", "oomph within 8 GiB, no clipping"): 0.04,
    ("3b-again", "oomph within 8 GiB, no clipping"): 0.045,
    ("3b", "oomph within 8 GiB, clipped"): 0.025,
}


SHARES: dict[str, float] = truth("host-shares")["seconds_by_host_share"]


@pytest.mark.parametrize("share", SHARES)
def test_the_host_slows_a_step_down_by_as_much_as_is_predicted(
    share: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its cores have what memory the link leaves to them."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    save_profile(Profile.from_dict(truth("profile")))
    row = truth("offload-3b")["rows"][truth("host-shares")["choices_of"]]
    choices = stored_choices(row["choices"] | {"host_share": float(share)})
    h200 = find_gpu("h200")
    clock = Clock.of(h200)
    phases = ("build", "first step", "step")
    timeline = rehearse(CASES["3b"].job(), h200, phases, choices=choices, clock=clock)
    assert step_cost(timeline, 1).seconds(clock) == pytest.approx(SHARES[share], rel=0.03)


@pytest.mark.parametrize(("case", "name"), OFFLOADED)
def test_what_left_the_gpu_took_the_memory_and_the_time_that_is_predicted(
    case: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    document = truth(f"offload-{case}")
    # Of the machine that it was measured on; disks differ from one to the next.
    save_profile(Profile.from_dict(truth("profile") | document.get("disk", {})))
    measured = document["rows"][name]
    h200, choices = find_gpu("h200"), stored_choices(measured["choices"])
    budget = float(name.split()[2])
    assert measured["reserved"] + device_overhead(h200).expected <= budget * GIB
    clock = Clock.of(h200)
    job = CASES[case.removesuffix("-again")].job(clips=", clipped" in name)
    timeline = rehearse(job, h200, PHASES, choices=choices, clock=clock)
    near = MEMORY_MISSED.get((case, name), 0.02)
    assert peak_allocated(timeline) == pytest.approx(measured["allocated"], rel=near)
    seconds = step_cost(timeline, 1).seconds(clock)
    within = SECONDS_MISSED.get(name, 0.1)
    assert seconds == pytest.approx(measured["seconds"], rel=within)
