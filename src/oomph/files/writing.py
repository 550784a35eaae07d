"""Writes oomph's own files: newly created, never through a link, and not writable by others.

A file is replaced atomically. The user's umask decides whether the group may read and write; others
can never write, whatever the umask says.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from oomph.errors import BadInput
from oomph.files.reading import check_name, check_regular

#: Most permissive modes of new files and folders, before the umask.
FILE_MODE, FOLDER_MODE = 0o664, 0o775


def open_new(path: str | Path) -> BinaryIO:
    """Create a file that does not exist yet, and open it for writing."""
    check_name(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, FILE_MODE), "wb")


def replace_whole(path: str | Path, content: bytes, *, sync: bool = False) -> None:
    """Write a file, atomically replacing an existing one.

    With `sync` the content is on disk before it replaces the old file.
    """
    check_name(path)
    target = Path(path)
    # The name cannot be guessed, so nobody can have put a link there.
    beside = target.with_name(f".{target.name[:200]}.{secrets.token_hex(8)}")
    try:
        with open_new(beside) as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        beside.replace(target)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def write_whole(path: str | Path, content: bytes) -> None:
    """The same, raising errors with an explanation."""
    try:
        replace_whole(path, content)
    except OSError as error:
        raise BadInput(f"cannot write {_shown(path)}: {error.strerror or error}") from None


def check_writable(path: str | Path) -> None:
    """Check now, rather than after the work is done, that the file can be written."""
    try:
        check_name(path)
    except OSError as error:
        raise BadInput(f"cannot write {_shown(path)}: {error.strerror}") from None
    folder = Path(path).parent
    if not folder.is_dir():
        raise BadInput(f"cannot write {path}: there is no folder {folder}")
    if Path(path).is_dir():
        raise BadInput(f"cannot write {path}: it is a folder; name a file in it")
    if not os.access(folder, os.W_OK):
        raise BadInput(f"cannot write {path}: nothing may be written to {folder}")


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, unless they exist."""
    check_name(folder)
    for one in (*reversed(folder.parents), folder):
        if not one.is_dir():
            with contextlib.suppress(FileExistsError):
                one.mkdir(FOLDER_MODE)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file; raises `BlockingIOError` if another process holds it.

    The file is created if it is missing. It is never written to, and must not be a link: others may
    be able to put files into the folder, too.
    """
    check_name(path)
    flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, FILE_MODE)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise OSError(errno.ELOOP, f"{path.name} is a link: remove it") from None
        raise
    try:
        check_regular(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield  # if the process is killed, that unlocks it, too
    finally:
        os.close(descriptor)


def _shown(path: str | Path) -> str:
    """A name as it is, unless it has unprintable characters."""
    return str(path) if str(path).isprintable() else repr(str(path))
