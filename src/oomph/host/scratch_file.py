"""A file with no name, past the page cache where the file system allows that.

It never had a name, or lost it the moment it was opened, so nobody else can open it, no folder has
to be cleaned, and the kernel gives its room back when the process ends, however it ends: a killed
process leaves nothing for the next one to find. Removing the folder does it no harm.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from oomph.errors import BadInput, DiskFull
from oomph.host.limits import host_limits
from oomph.units import format_bytes

log = logging.getLogger("oomph")

Bytes = NDArray[np.uint8]

#: What direct I/O wants addresses, offsets and lengths to be multiples of.
ALIGNMENT = max(mmap.PAGESIZE, 4096)

#: What is said of a write that the disk has no room for.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
#: What a file system says of what it does not know: files with no name, direct I/O, reserving room.
_UNKNOWN = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT})

_Call = Callable[[int, Sequence[memoryview], int], int]


class ScratchFile:
    """Room on a folder's disk, taken piece by piece and given back all at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._size = 0
        if host_limits(folder).disk_is_memory:
            log.warning("%s is no disk: its files take host memory; name another folder", folder)
        try:
            self._file = _open(folder)
        except OSError as error:
            raise BadInput(
                f"cannot write to the folder {folder}: {error.strerror}; name one that can be"
                " written to"
            ) from None
        self.close = weakref.finalize(self, os.close, self._file)
        """Give the room back; happens with the last reference at the latest."""
        self.direct = _make_direct(self._file)
        """Whether it is read and written past the page cache."""
        if not self.direct:
            log.warning("%s refuses direct I/O: the page cache will slow the disk down", folder)

    def take(self, nbytes: int) -> int:
        """Room for so many bytes, reserved now; returns where it begins."""
        offset, room = self._size, -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        try:
            if room > self._free():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _reserve(self._file, offset, room)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, offset)
            if error.errno in NO_ROOM:
                raise self.full(room, error) from None
            raise BadInput(
                f"cannot reserve room in {self.folder}: {error.strerror}; name a folder on another"
                " disk"
            ) from None
        self._size += room
        return offset

    def full(self, needed: int, error: OSError) -> DiskFull:
        """What a refusal of so many bytes means to the user."""
        if error.errno == errno.EFBIG:
            return DiskFull(
                f"files in {self.folder} may not grow by another {format_bytes(needed)}; raise the"
                " limit on their size (ulimit -f)",
                needed,
            )
        free = self._free()
        missing = max(needed - free, 1)
        return DiskFull(
            f"the disk of {self.folder} is full: {format_bytes(needed)} more is needed,"
            f" {format_bytes(free)} is free, at least {format_bytes(missing)} is missing; make"
            " room, look at your quota, or name a folder on another disk",
            missing,
        )

    def write(self, offset: int, pieces: Sequence[Bytes]) -> None:
        """Write all of the pieces, one after the other, without the GIL."""
        self._whole(os.pwritev, offset, pieces)

    def read(self, offset: int, pieces: Sequence[Bytes]) -> None:
        """Fill all of the pieces, without the GIL."""
        self._whole(os.preadv, offset, pieces)

    def _free(self) -> int:
        found = os.fstatvfs(self._file)
        return found.f_bavail * found.f_frsize

    def _whole(self, call: _Call, offset: int, pieces: Sequence[Bytes]) -> None:
        done, size = 0, sum(piece.nbytes for piece in pieces)
        while done < size:
            # Python itself repeats a call that a signal interrupted.
            reached = done + call(self._file, _after(pieces, done), offset + done)
            if self.direct and reached < size:
                reached -= reached % ALIGNMENT  # the next call may begin only there
            if reached <= done:
                raise OSError(errno.EIO, "its file was cut short")
            done = reached
        if not self.direct and hasattr(os, "posix_fadvise"):
            # Begins to write what is dirty and drops the rest: host memory is what is short.
            os.posix_fadvise(self._file, offset, size, os.POSIX_FADV_DONTNEED)


def default_folder() -> Path:
    """Where large files for a while belong: /tmp is memory on many machines."""
    folder = Path(os.environ.get("TMPDIR") or "/var/tmp")
    return folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir())


def _open(folder: Path) -> int:
    """A new file with no name."""
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
        except OSError as error:
            if error.errno not in _UNKNOWN:
                raise
    file, name = tempfile.mkstemp(prefix="oomph-", dir=folder)
    Path(name).unlink()
    return file


def _make_direct(file: int) -> bool:
    """Switch to direct I/O, if a write then succeeds: some file systems say no only there."""
    if hasattr(fcntl, "F_NOCACHE"):  # macOS
        fcntl.fcntl(file, fcntl.F_NOCACHE, 1)
    if not hasattr(os, "O_DIRECT"):
        return False
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        with mmap.mmap(-1, ALIGNMENT) as page:
            os.pwritev(file, [page], 0)
        os.ftruncate(file, 0)
    except OSError as error:
        if error.errno in NO_ROOM:
            return True  # whoever takes room will hear of it
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return False
    return True


def _reserve(file: int, offset: int, room: int) -> None:
    """Take the room now where the file system can promise it, else only make the file longer."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file, offset, room)
            return
        except OSError as error:
            if error.errno not in _UNKNOWN:
                raise
    os.ftruncate(file, offset + room)


def _after(pieces: Sequence[Bytes], done: int) -> list[memoryview]:
    """What is left of the pieces when so many bytes are done."""
    left = []
    for piece in pieces:
        if done < piece.nbytes:
            left.append(piece[done:].data)
        done = max(done - piece.nbytes, 0)
    return left
