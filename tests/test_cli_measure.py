"""`oomph gpus measure`, on the CPU that runs the tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oomph.cli import run
from oomph.hardware.profile import load_profile


def test_a_machine_is_measured_saved_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert run(["gpus", "measure", "--device", "cpu", "--seconds", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert Path(shown["file"]).is_relative_to(tmp_path)
    saved = load_profile("cpu")
    assert saved is not None
    assert saved.host_adam == shown["host_adam"] > 0


def test_a_device_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gpus", "measure", "--device", "banana"]) == 2
    assert "banana" in capsys.readouterr().err
