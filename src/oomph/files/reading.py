"""Opens files from any source, provided that they are regular files.

A pipe or a device would block its reader, and an endless file would fill the memory. Every problem
raises an `OSError` with an explanation in `strerror`: the caller catches it and adds what the file
was for.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from oomph.units import format_bytes

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading, without blocking on a pipe's other end."""
    flags = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
    check_name(path)
    descriptor = os.open(path, flags)
    try:
        check_regular(descriptor)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | Path, *, most: int) -> bytes:
    """All bytes of a regular file with at most `most` bytes."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {format_bytes(most)}")
    return content


def check_name(path: str | Path) -> None:
    """Refuse a name that no file can have, for which Python's own error is not an `OSError`."""
    if "\0" in os.fspath(path):
        raise OSError(errno.EINVAL, "its name has a NUL character")


def check_regular(descriptor: int) -> None:
    """Refuse an open descriptor that is not a file: a folder, a pipe, a device."""
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'something else')}, not a file")
