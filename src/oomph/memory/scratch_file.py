"""An unnamed file that bypasses the page cache where the file system allows it.

It never had a name, or lost it the moment it was opened, so no other process can open it, no folder
has to be cleaned up, and the kernel frees its space when the process ends, however it ends: a
killed process leaves nothing behind. Removing the folder does no harm.
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
from oomph.files.reading import check_name
from oomph.memory.limits import host_limits
from oomph.units import format_bytes

log = logging.getLogger("oomph")

Bytes = NDArray[np.uint8]

#: Direct I/O requires addresses, offsets and lengths that are multiples of this.
ALIGNMENT = max(mmap.PAGESIZE, 4096)

#: Errors of a write that the disk has no room for.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
#: Errors of a file system without support for unnamed files, direct I/O or reserving space.
_UNKNOWN = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT})

_Call = Callable[[int, Sequence[memoryview], int], int]


class ScratchFile:
    """Space on a folder's disk, taken piece by piece and freed all at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._size = 0
        try:
            check_name(folder)
        except OSError as error:
            raise BadInput(f"{str(folder)!r} is no folder: {error.strerror}") from None
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
        """Free the space; happens with the last reference at the latest."""
        self.direct = _make_direct(self._file)
        """Whether reads and writes bypass the page cache."""
        if not self.direct:
            log.warning("%s refuses direct I/O: the page cache will slow the disk down", folder)

    def take(self, nbytes: int) -> int:
        """Reserve `nbytes` bytes; returns their offset in the file."""
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
        """The error to raise when the disk refuses this many bytes."""
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
        """Write all pieces one after the other, without the GIL."""
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
            # Python itself retries a call that a signal interrupted.
            reached = done + call(self._file, _after(pieces, done), offset + done)
            if self.direct and reached < size:
                reached -= reached % ALIGNMENT  # direct I/O continues at an aligned offset
            if reached <= done:
                raise OSError(errno.EIO, "its file was cut short")
            done = reached
        if not self.direct and hasattr(os, "posix_fadvise"):
            # Starts writeback and drops clean pages from the cache: host memory is scarce.
            os.posix_fadvise(self._file, offset, size, os.POSIX_FADV_DONTNEED)


def default_folder() -> Path:
    """The folder for large temporary files, which is not /tmp: that is memory on many machines."""
    folder = Path(os.environ.get("TMPDIR") or "/var/tmp")
    return folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir())


def _open(folder: Path) -> int:
    """Open a new unnamed file."""
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
    """Switch to direct I/O if a test write succeeds: some file systems refuse only then."""
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
            return True  # reserving space will raise the error
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return False
    return True


def _reserve(file: int, offset: int, room: int) -> None:
    """Reserve the space if the file system supports it, otherwise only extend the file."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file, offset, room)
            return
        except OSError as error:
            if error.errno not in _UNKNOWN:
                raise
    os.ftruncate(file, offset + room)


def _after(pieces: Sequence[Bytes], done: int) -> list[memoryview]:
    """What is left of the pieces after the first `done` bytes."""
    left = []
    for piece in pieces:
        if done < piece.nbytes:
            left.append(piece[done:].data)
        done = max(done - piece.nbytes, 0)
    return left
