"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from oomph.errors import BadInput


def write_whole(path: str | Path, content: bytes) -> None:
    """Write a file; one that is there already is replaced only by a whole one."""
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        try:
            beside.write_bytes(content)
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise BadInput(f"cannot write {target}: {error.strerror}") from None


def check_writable(path: str | Path) -> None:
    """Say now, not after the work is done, that there is no place for the file."""
    folder = Path(path).parent
    if not folder.is_dir():
        raise BadInput(f"cannot write {path}: there is no folder {folder}")
    if Path(path).is_dir():
        raise BadInput(f"cannot write {path}: it is a folder; name a file in it")
    if not os.access(folder, os.W_OK):
        raise BadInput(f"cannot write {path}: nothing may be written to {folder}")
