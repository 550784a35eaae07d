"""A folder of checkpoints; the newest is always complete.

A checkpoint is written under a private name, synced to disk, and then renamed: a process that is
killed at any moment leaves the last checkpoint or the new one, never half of one. Any leftovers
have a recognizable name, and the next save removes them. Checkpoints are numbered in the order they
were written, `000012-step-600`; the highest number is the newest, even if a run went back to an
earlier step.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from oomph.errors import BadCheckpoint, BadInput, DiskFull
from oomph.files.writing import FOLDER_MODE, locked, make_folder
from oomph.units import format_bytes

#: The file that describes the rest of a checkpoint.
MANIFEST = "checkpoint.json"

_NAME = re.compile(r"(\d{6,})-step-(\d+)")
#: Folders being filled or removed; nothing else in the folder has such a name.
_UNFINISHED = ".oomph-unfinished-"
_LOCK = ".oomph-lock"


@contextlib.contextmanager
def new_checkpoint(folder: Path, *, step: int, size: int, keep: int) -> Iterator[Path]:
    """A private folder to fill, which becomes the newest checkpoint; the last `keep` are kept.

    If anything inside fails, the private folder is removed and all older checkpoints remain. `size`
    is how many bytes it will hold.
    """
    if keep < 1:
        raise BadInput(f"at least one checkpoint must be kept, not {keep}")
    with _in_words(folder, size), _only_writer(folder):
        _remove_unfinished(folder)
        _check_room(folder, size)
        private = folder / f"{_UNFINISHED}{os.getpid()}"
        private.mkdir(FOLDER_MODE)
        try:
            yield private
            sync_folder(private)
            private.rename(folder / f"{_next_number(folder):06d}-step-{step}")
        except BaseException:
            shutil.rmtree(private, ignore_errors=True)
            raise
        sync_folder(folder)
        for old in checkpoints(folder)[:-keep]:
            # Rename it first: half a checkpoint must not look like a whole one.
            doomed = folder / f"{_UNFINISHED}{old.name}"
            old.rename(doomed)
            shutil.rmtree(doomed)


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints of a folder, the newest last."""
    try:
        found = [(int(name[1]), path) for path in folder.iterdir() if (name := _match(path))]
    except (OSError, ValueError):  # it is missing or unreadable
        return []
    return [path for _, path in sorted(found)]


def newest_checkpoint(path: Path) -> Path:
    """The newest checkpoint of a folder; `path` itself if it is a checkpoint."""
    if _match(path) or (path / MANIFEST).exists():
        return path
    if found := checkpoints(path):
        return found[-1]
    raise BadCheckpoint(f"there is no checkpoint in {path}; `run.save` writes them")


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk."""
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
    """Convert file system errors into ours."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(folder, size) from None
        raise BadInput(
            f"cannot save to {str(folder)!r}: {error.strerror or error}; name a folder that can be"
            " written to"
        ) from None


@contextlib.contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Create the folder if needed, and lock it: two writers would remove each other's work."""
    if not folder.is_dir():
        make_folder(folder)
        sync_folder(folder.parent)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / _LOCK))
        except BlockingIOError:
            raise BadInput(
                f"another process is saving to {folder}; give each run a folder of its own"
            ) from None
        yield


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
