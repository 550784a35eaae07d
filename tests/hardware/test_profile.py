"""Profiles: what is saved is what is loaded, what was tampered with is refused in words."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oomph.errors import BadInput
from oomph.hardware import find_gpu
from oomph.hardware.profile import Profile, load_profile, profile_path, save_profile
from oomph.hardware.timing.clock import EFFICIENCY

H200 = find_gpu("h200")
PROFILE = Profile(
    gpu="h200",
    torch="2.11.0",
    date="2026-01-31T12:00:00+00:00",
    driver="580.1",
    product_rates={
        "fp32": ((1e9, 2e13), (1e12, 5e13)),
        "bf16": ((1e9, 1e14), (2e11, 6e14), (4e11, 7e14), (1e12, 8e14)),
    },
    attention_rates={"bf16": {"forward": 5e14, "backward": 4e14}},
    convolution_rates={"fp32": 3e13, "bf16": 3e14},
    memory_bandwidth=4e12,
    launch_seconds=4e-6,
    host_to_device=5.5e10,
    disk_method="direct I/O, 1.00 GiB in /scratch",
    host_adam=1e9,
    host_threads=16,
)


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def write(values: Any) -> None:
    path = save_profile(PROFILE)
    path.write_text(values if isinstance(values, str) else json.dumps(values))


# --- Where it is ----------------------------------------------------------------------------------


def test_what_is_saved_is_what_is_loaded(config) -> None:
    path = save_profile(PROFILE)
    assert path == config / "oomph" / "gpus" / "h200.json"
    assert load_profile("h200") == PROFILE


def test_any_spelling_of_a_name_finds_it() -> None:
    save_profile(PROFILE)
    assert load_profile("NVIDIA H200") == PROFILE
    toy = dataclasses.replace(PROFILE, gpu="NVIDIA Toy/../9000")
    assert save_profile(toy).name == "nvidia-toy-9000.json"
    assert load_profile("NVIDIA Toy/../9000") == toy


def test_a_card_that_was_not_measured_has_none() -> None:
    assert load_profile("h200") is None


def test_without_xdg_it_is_in_the_home_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = tmp_path / ".config" / "oomph" / "gpus" / "h200.json"
    for value in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CONFIG_HOME", value)
        assert profile_path("h200") == expected
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert profile_path("h200") == expected


def test_a_name_of_signs_alone_is_refused() -> None:
    with pytest.raises(BadInput, match="no name of a GPU"):
        profile_path("../..")


def test_it_is_read_without_torch() -> None:
    code = "import sys, oomph.hardware.profile; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- Writing it -----------------------------------------------------------------------------------


def test_a_save_that_breaks_off_leaves_the_old_one_and_nothing_else(monkeypatch) -> None:
    path = save_profile(PROFILE)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BadInput, match="No space left on device; XDG_CONFIG_HOME"):
        save_profile(dataclasses.replace(PROFILE, torch="9.9"))
    assert load_profile("h200") == PROFILE
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_is_said_in_words(config) -> None:
    (config / "oomph").write_text("a file where the folder should be")
    with pytest.raises(BadInput, match="cannot write the GPU profile"):
        save_profile(PROFILE)


def test_a_number_that_json_has_not_is_never_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_profile(dataclasses.replace(PROFILE, pinning=float("inf")))
    assert load_profile("h200") is None


# --- Reading what is not right --------------------------------------------------------------------


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_a_truncated_file_is_refused_with_what_to_do(part: float) -> None:
    text = json.dumps(PROFILE.as_dict())
    write(text[: int(part * len(text))])
    with pytest.raises(BadInput, match=r"h200\.json.*part of one.*oomph gpus measure"):
        load_profile("h200")


@pytest.mark.parametrize("document", [[], 3, {}, {"kind": "oomph plan", "schema_version": 1}])
def test_another_document_is_refused(document: Any) -> None:
    write(document)
    with pytest.raises(BadInput, match=r"h200\.json: this is no GPU profile.*oomph gpus measure"):
        load_profile("h200")


@pytest.mark.parametrize("schema", [0, 2, "1", None])
def test_an_unknown_schema_is_refused(schema: Any) -> None:
    write({**PROFILE.as_dict(), "schema_version": schema})
    with pytest.raises(BadInput, match=r"schema .*, and this oomph reads 1; `oomph gpus measure`"):
        load_profile("h200")


EDITS = {
    "memory_bandwidth": [-1, 0, "fast", True, float("nan"), float("inf"), 10**400, [1]],
    "product_rates": [None, [], {"bf16": 1}, {"bf16": [[1]]}, {"bf16": [[1, 0]]}, {"bf16": [3]}],
    "attention_rates": [None, {"bf16": 1}, {"bf16": {"forward": "fast"}}],
    "convolution_rates": [{"bf16": -1}, {"bf16": None}],
    "gpu": [None, 3],
    "driver": [3],
    "torch": [None],
    "disk_method": [None],
    "host_threads": ["all", 0],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in EDITS.items() for value in values]
)
def test_an_edited_value_is_refused_by_name(key: str, value: Any) -> None:
    write({**PROFILE.as_dict(), key: value})
    with pytest.raises(BadInput, match=rf"profile's {key}: .*oomph gpus measure"):
        load_profile("h200")


def test_a_missing_and_an_unknown_key_are_refused_by_name() -> None:
    values = PROFILE.as_dict()
    write({**values, "warp_speed": 9})
    with pytest.raises(BadInput, match="unknown 'warp_speed'"):
        load_profile("h200")
    del values["pinning"]
    write(values)
    with pytest.raises(BadInput, match="lacks its 'pinning'"):
        load_profile("h200")


def test_a_profile_of_another_card_is_refused() -> None:
    write({**PROFILE.as_dict(), "gpu": "a100-80gb"})
    with pytest.raises(BadInput, match="a profile of a100-80gb, not of h200"):
        load_profile("h200")


# --- Efficiency -----------------------------------------------------------------------------------


def test_efficiency_is_the_part_of_the_data_sheet_that_large_kernels_reach() -> None:
    bf16 = H200.rates["bf16"]
    assert PROFILE.efficiency(H200) == pytest.approx(
        {
            "product": 7e14 / bf16,  # the median of the three that are large
            "convolution": 3e14 / bf16,
            "attention": 5e14 / bf16,
            "attention backward": 4e14 / bf16,
            "elementwise": 4e12 / 4.8e12,
        }
    )


def test_its_keys_are_those_the_clock_knows() -> None:
    assert PROFILE.efficiency(H200).keys() == EFFICIENCY.keys()


def test_a_dtype_that_the_card_is_not_rated_for_does_not_count() -> None:
    card = dataclasses.replace(H200, rates={"fp32": 6.7e13})
    efficiency = PROFILE.efficiency(card)
    assert efficiency["product"] == pytest.approx(5e13 / 6.7e13)
    assert "attention" not in efficiency


def test_what_was_not_measured_is_left_out() -> None:
    assert Profile(gpu="h200", torch="2.11", date="2026-01-31").efficiency(H200) == {}


def test_efficiency_stays_in_its_bounds() -> None:
    fast = dataclasses.replace(PROFILE, memory_bandwidth=1e15)
    assert fast.efficiency(H200)["elementwise"] == 1.5
    slow = dataclasses.replace(PROFILE, memory_bandwidth=1.0)
    assert 0 < slow.efficiency(H200)["elementwise"] < 0.01
