"""A file with no name: nobody else sees it, and nothing of it is left."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oomph.errors import BadInput, DiskFull
from oomph.memory.scratch_file import ALIGNMENT, Bytes, ScratchFile
from oomph.units import MIB


@pytest.fixture
def file(tmp_path: Path) -> Iterator[ScratchFile]:
    file = ScratchFile(tmp_path)
    yield file
    file.close()


def pages(count: int, seed: int = 0) -> Bytes:
    """Noise that begins at a page."""
    memory = np.empty((count + 1) * ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    noise = memory[start : start + count * ALIGNMENT]
    noise[:] = np.random.default_rng(seed).integers(0, 256, noise.nbytes, dtype=np.uint8)
    return noise


def round_trip(file: ScratchFile) -> None:
    written, read = pages(3), pages(3, seed=1)
    offset = file.take(written.nbytes)
    file.write(offset, [written[:ALIGNMENT], written[ALIGNMENT:]])
    file.read(offset, [read])
    assert np.array_equal(read, written)


def test_what_was_written_comes_back_and_the_folder_stays_empty(
    file: ScratchFile, tmp_path: Path
) -> None:
    round_trip(file)
    assert not list(tmp_path.iterdir())


def test_room_does_not_overlap(file: ScratchFile) -> None:
    first, second = file.take(ALIGNMENT + 1), file.take(0)
    assert (first, second, file.take(1)) == (0, 2 * ALIGNMENT, 3 * ALIGNMENT)


def test_file_systems_without_nameless_files_see_a_name_only_while_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no")
        return real(path, flags, *args, **kwargs)

    real = os.open
    monkeypatch.setattr(os, "open", refuses)
    file = ScratchFile(tmp_path)
    round_trip(file)
    assert not list(tmp_path.iterdir())
    file.close()


def test_file_systems_that_refuse_direct_writes_get_plain_ones_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses_direct(file: int, *args: Any) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return real(file, *args)

    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", refuses_direct)
    with caplog.at_level(logging.WARNING, "oomph"):
        file = ScratchFile(tmp_path)
        assert not file.direct
        round_trip(file)
        round_trip(file)
    file.close()
    assert [record.message for record in caplog.records] == [
        f"{tmp_path} refuses direct I/O: the page cache will slow the disk down"
    ]


def test_calls_that_do_less_than_asked_are_continued(
    file: ScratchFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def partly(real: Callable[..., int]) -> Callable[..., int]:
        def call(file: int, buffers: list[memoryview], offset: int) -> int:
            calls.append(offset)
            return real(file, [buffers[0][:ALIGNMENT]], offset)

        return call

    monkeypatch.setattr(os, "pwritev", partly(os.pwritev))
    monkeypatch.setattr(os, "preadv", partly(os.preadv))
    round_trip(file)
    assert calls == [0, ALIGNMENT, 2 * ALIGNMENT] * 2


def test_a_direct_call_that_ends_inside_a_block_is_continued_at_its_beginning(
    file: ScratchFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not file.direct:
        pytest.skip("no direct I/O here")
    real, shortened = os.preadv, []

    def short(file: int, buffers: list[memoryview], offset: int) -> int:
        if shortened:
            return real(file, buffers, offset)
        shortened.append(True)
        real(file, [buffers[0][: 2 * ALIGNMENT]], offset)
        return ALIGNMENT + 100

    monkeypatch.setattr(os, "preadv", short)
    round_trip(file)


def test_a_file_that_was_cut_short_is_an_error_and_no_endless_loop(file: ScratchFile) -> None:
    offset = file.take(2 * ALIGNMENT)
    file.write(offset, [pages(2)])
    os.ftruncate(file._file, 100)
    with pytest.raises(OSError, match="cut short"):
        file.read(offset, [pages(2)])


# --- No room --------------------------------------------------------------------------------------


def test_more_room_than_the_disk_has_is_refused_with_what_is_missing(
    file: ScratchFile, tmp_path: Path
) -> None:
    disk = os.statvfs(tmp_path)
    with pytest.raises(DiskFull, match=r"is full: .* make room") as caught:
        file.take(disk.f_blocks * disk.f_frsize + MIB)
    assert caught.value.missing >= MIB
    round_trip(file)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_cannot_reserve_the_room_is_full(
    file: ScratchFile, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuses(*_: int) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(os, "posix_fallocate", refuses)
    with pytest.raises(DiskFull, match="look at your quota"):
        file.take(MIB)


def test_a_limit_on_the_size_of_files_is_named(file: ScratchFile) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
    try:
        with pytest.raises(DiskFull, match="ulimit -f"):
            file.take(2 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.fstat(file._file).st_size == 0


def test_file_systems_that_cannot_reserve_room_are_used_all_the_same(
    file: ScratchFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "posix_fallocate", unknown)
    round_trip(file)


# --- Folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["missing", "file"])
def test_what_is_no_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="folder"):
        ScratchFile(tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(BadInput, match="Permission denied; name one that can be written to"):
        ScratchFile(tmp_path)


def test_a_file_system_that_is_read_only_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuses)
    with pytest.raises(BadInput, match="Read-only file system; name one"):
        ScratchFile(tmp_path)


def test_a_folder_that_vanishes_does_no_harm(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file = ScratchFile(folder)
    written, read = pages(1), pages(1, seed=1)
    offset = file.take(written.nbytes)
    file.write(offset, [written])
    folder.rmdir()
    file.read(offset, [read])
    assert np.array_equal(read, written)
    round_trip(file)
    file.close()


def test_a_link_in_the_folder_is_neither_followed_nor_touched(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "oomph-link").symlink_to(precious)
    file = ScratchFile(folder)
    round_trip(file)
    file.close()
    assert precious.read_text() == "keep"
    assert [path.name for path in folder.iterdir()] == ["oomph-link"]


WRITES_FOREVER = """
import sys
from pathlib import Path
import torch
from oomph.memory.disk import DiskStore
store = DiskStore(Path(sys.argv[1]))
slots = [store.slot(1 << 20) for _ in range(8)]
print("begun", flush=True)
while True:
    for write in [store.write(slot, torch.ones(1 << 20, dtype=torch.uint8)) for slot in slots]:
        write.finish()
"""


def test_killed_processes_leave_nothing_and_others_are_not_disturbed(tmp_path: Path) -> None:
    mine = ScratchFile(tmp_path)
    written, read = pages(2), pages(2, seed=1)
    offset = mine.take(written.nbytes)
    mine.write(offset, [written])
    command = [sys.executable, "-c", WRITES_FOREVER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "begun\n"
        opened = Path(f"/proc/{child.pid}/fd")
        if opened.exists():
            assert any(str(tmp_path) in str(link.readlink()) for link in opened.iterdir())
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())
    mine.read(offset, [read])
    assert np.array_equal(read, written)
    mine.close()
