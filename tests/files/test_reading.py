"""Only regular files are read, and none without an end; no reader waits for a pipe."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import oomph
from oomph.errors import OomphError
from oomph.files.reading import open_regular, read_regular
from oomph.hardware import profile
from oomph.hardware.prices import load_prices
from oomph.hardware.profile import load_profile, profile_path
from oomph.jobs.models.building import model_from_config_path
from oomph.plans.plan import Plan
from oomph.runs.elastic import Elastic, Elasticity
from oomph.runs.loading import load_checkpoint
from oomph.runs.weight_files import WeightFiles


@pytest.fixture(autouse=True)
def nobody_waits() -> Iterator[None]:
    """A reader that waits for a pipe is interrupted."""

    def too_long(*_: Any) -> None:
        raise AssertionError("a reader waits for ever")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_folder(path: Path) -> None:
    path.mkdir()


def _load_profile(path: Path) -> Any:
    return load_profile("h200")


#: Everything that reads files that somebody else may have written, by the name it gives them.
LOADERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "explain": ("report.json", oomph.explain),
    "compare": ("report.json", lambda path: oomph.compare(path, path)),
    "plan": ("plan.json", Plan.load),
    "prices": ("prices.toml", load_prices),
    "profile": ("h200.json", _load_profile),
    "config": ("config.json", model_from_config_path),
    "manifest": ("checkpoint.json", lambda path: load_checkpoint(path.parent)),
    "weights": ("model.safetensors", lambda path: WeightFiles(path.parent)),
    "index": ("model.safetensors.index.json", lambda path: WeightFiles(path.parent)),
}


@pytest.mark.parametrize("make", [a_pipe, a_device, a_folder])
@pytest.mark.parametrize("loader", LOADERS)
def test_what_is_no_file_is_refused_at_once(
    loader: str, make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, load = LOADERS[loader]
    monkeypatch.setattr(profile, "profile_path", lambda _: tmp_path / name)
    make(tmp_path / name)
    if loader == "config" and make is a_folder:
        (tmp_path / name / "config.json").mkdir()
    words = {a_pipe: "a pipe", a_device: "a device", a_folder: "a folder|no safetensors"}
    with pytest.raises(OomphError, match=words[make]):
        load(tmp_path / name)


@pytest.mark.parametrize("make", [a_pipe, a_device, a_folder])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_pipe_in_a_checkpoint_is_refused_at_once(
    name: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.ones(2, 2), torch.ones(2, 2)
    run = oomph.fit(model, optimizer, nn.MSELoss(), batch, budget="1GiB")
    path = run.save(tmp_path)
    (path / name).unlink()
    make(path / name)
    with pytest.raises(OomphError, match=r"cannot be read: it is a"):
        load_checkpoint(path)


def test_a_run_goes_on_where_the_file_it_follows_is_a_pipe(tmp_path: Path) -> None:
    a_pipe(tmp_path / "limit")
    device = torch.device("cpu")
    for ask in (tmp_path / "limit", "no\0name"):
        assert Elasticity(Elastic(ask=ask), device, None)._limit(7).nbytes == 7
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00 12GiB")
    assert Elasticity(Elastic(ask=tmp_path / "bytes"), device, None)._limit(7).nbytes == 7


@pytest.mark.parametrize("load", [load for _, load in LOADERS.values() if load != _load_profile])
def test_a_name_with_a_nul_is_refused_in_words(load: Callable[[Path], Any]) -> None:
    with pytest.raises(OomphError):
        load(Path("no\0name") / "config\0.json")


def test_places_to_write_to_with_a_nul_are_refused_in_words(tmp_path: Path) -> None:
    from oomph.explaining.oom_report import check_report_path
    from oomph.files.writing import check_writable, write_whole
    from oomph.memory.scratch_file import ScratchFile
    from oomph.runs.checkpoint_folder import new_checkpoint

    def save(path: Path) -> None:
        with new_checkpoint(path, step=1, size=1, keep=1):
            pass

    calls: list[Callable[[Path], Any]] = [
        check_report_path,
        check_writable,
        lambda path: write_whole(path, b""),
        ScratchFile,
        save,
    ]
    for call in calls:
        with pytest.raises(OomphError, match="NUL"):
            call(tmp_path / "no\0name")


def test_a_file_is_read_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)
    assert read_regular(tmp_path / "file", most=100) == b"x" * 100
    with pytest.raises(OSError, match="more than 99 B"):
        read_regular(tmp_path / "file", most=99)


def test_a_link_to_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(json.dumps(1))
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"1"


def test_no_descriptor_is_left_open_by_a_refusal(tmp_path: Path) -> None:
    a_pipe(tmp_path / "pipe")
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(5):
        with pytest.raises(OSError, match="a pipe"):
            open_regular(tmp_path / "pipe")
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    assert profile_path("h200").name == "h200.json"
