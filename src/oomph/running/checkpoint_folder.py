"""A folder of checkpoints, of which the newest is always whole.

A checkpoint is filled under a private name, written through to the disk, and then renamed: a
process that is killed at any moment leaves the last checkpoint or the new one, never half of one.
What it leaves besides has a name of ours, and the next save removes it. Checkpoints are numbered in
the order they were written, `000012-step-600`; the highest number is the newest, also where a run
went back to an earlier step.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from oomph.errors import BadCheckpoint, BadInput, DiskFull
from oomph.units import format_bytes

#: The file that says what else is in a checkpoint.
MANIFEST = "checkpoint.json"

_NAME = re.compile(r"(\d{6,})-step-(\d+)")
#: Folders that are being filled or removed; nothing else in the folder has such a name.
_UNFINISHED = ".oomph-unfinished-"
_LOCK = ".oomph-lock"


@contextlib.contextmanager
def new_checkpoint(folder: Path, *, step: int, size: int, keep: int) -> Iterator[Path]:
    """A private folder to fill, which becomes the newest checkpoint; afterwards `keep` are left.

    If anything fails inside, it vanishes, and all older checkpoints are still there. `size` is how
    many bytes it will hold.
    """
    if keep < 1:
        raise BadInput(f"at least one checkpoint must be kept, not {keep}")
    with _in_words(folder, size), _only_writer(folder):
        _remove_unfinished(folder)
        _check_room(folder, size)
        private = folder / f"{_UNFINISHED}{os.getpid()}"
        private.mkdir()
        try:
            yield private
            sync_folder(private)
            private.rename(folder / f"{_next_number(folder):06d}-step-{step}")
        except BaseException:
            shutil.rmtree(private, ignore_errors=True)
            raise
        sync_folder(folder)
        for old in checkpoints(folder)[:-keep]:
            # Renamed first: half a checkpoint must not look like one.
            doomed = folder / f"{_UNFINISHED}{old.name}"
            old.rename(doomed)
            shutil.rmtree(doomed)


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints of a folder, the newest last."""
    try:
        found = [(int(name[1]), path) for path in folder.iterdir() if (name := _match(path))]
    except OSError:
        return []
    return [path for _, path in sorted(found)]


def newest_checkpoint(path: Path) -> Path:
    """The newest checkpoint of a folder; a checkpoint itself is its own."""
    if _match(path) or (path / MANIFEST).exists():
        return path
    if found := checkpoints(path):
        return found[-1]
    raise BadCheckpoint(f"there is no checkpoint in {path}; `run.save` writes them")


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _match(path: Path) -> re.Match[str] | None:
    return _NAME.fullmatch(path.name) if path.is_dir() else None


def _next_number(folder: Path) -> int:
    found = checkpoints(folder)
    return int(found[-1].name.split("-")[0]) + 1 if found else 1


@contextlib.contextmanager
def _in_words(folder: Path, size: int) -> Iterator[None]:
    """Errors of the file system as errors of ours."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(folder, size) from None
        raise BadInput(
            f"cannot save to {folder}: {error.strerror or error}; name a folder that can be"
            " written to"
        ) from None


@contextlib.contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Makes the folder if need be; two that write at once would remove each other's work."""
    if not folder.is_dir():
        folder.mkdir(parents=True)
        sync_folder(folder.parent)
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(
                f"another process is saving to {folder}; give each run a folder of its own"
            ) from None
        try:
            yield  # being killed unlocks it, too
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)


def _remove_unfinished(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name.startswith(_UNFINISHED) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


def _check_room(folder: Path, size: int) -> None:
    if shutil.disk_usage(folder).free < size:
        raise _disk_full(folder, size)


def _disk_full(folder: Path, size: int) -> DiskFull:
    free = shutil.disk_usage(folder).free
    missing = max(size - free, 1)
    return DiskFull(
        f"a checkpoint of {format_bytes(size)} does not fit on the disk of {folder}, which has"
        f" {format_bytes(free)} free: at least {format_bytes(missing)} is missing; older"
        " checkpoints are still there",
        missing,
    )
