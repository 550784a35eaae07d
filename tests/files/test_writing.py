"""What oomph writes goes through no link, and no stranger can write to it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import oomph
from oomph.errors import BadInput
from oomph.files import writing
from oomph.files.writing import locked, make_folder, open_new, replace_whole, write_whole
from oomph.hardware import profile
from oomph.hardware.profile import Profile, save_profile


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def start() -> oomph.Run:
    model = nn.Linear(2, 2)
    batch = torch.ones(2, 2), torch.ones(2, 2)
    return oomph.fit(
        model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(), batch, budget="1GiB"
    )


def writable_by_all(folder: Path) -> list[Path]:
    found = [folder, *folder.rglob("*")]
    return [path for path in found if path.lstat().st_mode & stat.S_IWOTH]


def test_strangers_write_to_nothing_whatever_the_umask(
    tmp_path: Path, no_umask: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "profile_path", lambda _: tmp_path / "config" / "gpus" / "p.json")
    run = start()
    run.save(tmp_path / "runs" / "one")
    run.plan.save(tmp_path / "plan.json")
    run.plan.save_html(tmp_path / "plan.html")
    batch = torch.ones(2, 2), torch.ones(2, 2)
    job = oomph.Job(nn.Linear(2, 2), nn.MSELoss(), "sgd", batch)
    oomph.estimate(job, phases=("step",)).export(tmp_path / "memory.json")
    save_profile(Profile(gpu="h200", torch="2.13", date="2026-01-01"))
    assert len(list(tmp_path.rglob("*"))) > 10
    assert writable_by_all(tmp_path) == []


def test_the_users_umask_takes_more(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_whole(tmp_path / "file", b"mine")
        make_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("file", "a", "a/b")]
    assert modes == [0o600, 0o700, 0o700]


def test_a_lock_that_is_a_link_is_refused_and_its_target_stays(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / ".oomph-lock").symlink_to(victim)
    with pytest.raises(BadInput, match="oomph-lock is a link: remove it"):
        start().save(folder)
    assert victim.read_text() == "precious"


def test_a_lock_that_is_a_link_to_nowhere_makes_nothing(tmp_path: Path) -> None:
    (tmp_path / ".oomph-lock").symlink_to(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="is a link"):
        start().save(tmp_path)
    assert not (tmp_path / "nowhere").exists()


def test_a_file_in_a_locks_place_keeps_its_content(tmp_path: Path) -> None:
    (tmp_path / ".oomph-lock").write_text("somebody's notes")
    start().save(tmp_path)
    assert (tmp_path / ".oomph-lock").read_text() == "somebody's notes"


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_a_lock_that_is_no_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    lock = tmp_path / ".oomph-lock"
    os.mkfifo(lock) if kind == "pipe" else lock.mkdir()
    with pytest.raises(BadInput, match=rf"a {kind}|Is a directory"):
        start().save(tmp_path)


def test_a_lock_is_one_holders_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path / "lock"), pytest.raises(BlockingIOError), locked(tmp_path / "lock"):
        pass
    with locked(tmp_path / "lock"):
        pass


def test_a_new_file_is_made_through_no_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "link").symlink_to(victim)
    with pytest.raises(FileExistsError):
        open_new(tmp_path / "link")
    assert victim.read_text() == "precious"


def test_a_report_replaces_a_link_and_not_what_it_leads_to(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "report").symlink_to(victim)
    write_whole(tmp_path / "report", b"new")
    assert victim.read_text() == "precious"
    assert (tmp_path / "report").read_bytes() == b"new"


def test_nobody_can_know_the_name_a_file_has_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []

    def noted(path: Path):  # type: ignore[no-untyped-def]
        names.append(path.name)
        return open_new(path)

    monkeypatch.setattr(writing, "open_new", noted)
    for _ in range(2):
        replace_whole(tmp_path / "report", b"")
    assert names[0] != names[1]
    assert [path.name for path in tmp_path.iterdir()] == ["report"]
