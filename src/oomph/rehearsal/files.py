"""A rehearsed script leaves the disk unchanged: its writes go to a private folder.

Files that the script wrote are read back from there, files it deleted disappear for the script
only, and at the end the folder is removed. This covers Python's own file functions; a library that
writes from C is not covered. Download caches are shared with real runs and stay where they are.
"""

# pathlib would call the very functions that are replaced here.
# ruff: noqa: PTH100, PTH111, PTH118, PTH120
from __future__ import annotations

import builtins
import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from oomph.process.rehearsal_threads import replaced_here

_NEVER_PRIVATE = ("/dev", "/proc", "/sys")
_CACHE_VARIABLES = ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """While active, nothing that Python code writes reaches the user's own files."""
    with tempfile.TemporaryDirectory(prefix="oomph-") as folder:
        overlay = _Overlay(os.path.realpath(folder))
        with contextlib.ExitStack() as stack:
            for owner, name, replace in _REPLACED:
                function = replace(overlay, getattr(owner, name))
                stack.enter_context(replaced_here(owner, name, function))
            temporary = Path(overlay.folder, "tmp")
            temporary.mkdir()
            place = str(temporary)
            stack.enter_context(replaced_here(tempfile, "gettempdir", lambda: place))
            stack.enter_context(replaced_here(tempfile, "gettempdirb", lambda: os.fsencode(place)))
            yield


class _Overlay:
    """Maps the script's paths to where its files really are."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.gone: set[str] = set()
        caches = [os.environ[name] for name in _CACHE_VARIABLES if os.environ.get(name)]
        self._left_alone = tuple(
            form(path)
            for path in (*_NEVER_PRIVATE, folder, os.path.expanduser("~/.cache"), *caches)
            for form in (os.path.abspath, os.path.realpath)
        )
        # The real functions: while the overlay is active, the names in `os` lead back here.
        self._lexists, self._makedirs = _untouched_lexists(os.lstat), _makedirs(os.mkdir, os.stat)

    def covers(self, path: Any) -> bool:
        """Whether writes to this path go to the private folder."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return False
        return not _is_inside(path, self._left_alone)

    def private(self, path: Any) -> str:
        """Where the private folder keeps this path."""
        return self.folder + "/files" + _full(path)

    def has(self, path: Any) -> bool:
        """Whether the script wrote this path itself."""
        return self._lexists(self.private(path))

    def exists(self, path: Any) -> bool:
        """Whether the script would find something at this path."""
        return self.has(path) or (not self.is_gone(path) and self._lexists(os.fsdecode(path)))

    def is_gone(self, path: Any) -> bool:
        """Whether the script deleted the path, or a folder that contains it."""
        return _is_inside(path, self.gone)

    def delete(self, path: Any) -> None:
        """Hide the path from the script; a real file stays."""
        self.gone.add(_full(path))

    def to_read(self, path: Any) -> Any:
        """Where to read this path from."""
        if not self.covers(path):
            return path
        if self.has(path) or self.is_gone(path):
            return self.private(path)
        return path

    def to_write(self, path: Any) -> str:
        """Where to write this path; its folder is created there if the script would find it."""
        target = self.private(path)
        folder = os.path.dirname(_full(path))
        if self.exists(folder):
            self._makedirs(os.path.dirname(target))
        return target


def _full(path: Any) -> str:
    return os.path.abspath(os.fsdecode(path))


def _is_inside(path: Any, places: Iterable[str]) -> bool:
    full = _full(path)
    return any(full == place or full.startswith(place + "/") for place in places)


def _untouched_lexists(lstat: Callable[..., Any]) -> Callable[[str], bool]:
    def lexists(path: str) -> bool:
        try:
            lstat(path)
        except (OSError, ValueError):
            return False
        return True

    return lexists


def _makedirs(mkdir: Callable[..., Any], stat: Callable[..., Any]) -> Callable[[str], None]:
    def makedirs(path: str) -> None:
        try:
            stat(path)
        except OSError:
            makedirs(os.path.dirname(path))
            mkdir(path)

    return makedirs


# -- the functions that are replaced: each takes the overlay and the real function ----------------


def _open(overlay: _Overlay, real: Callable[..., Any]) -> Callable[..., Any]:
    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not overlay.covers(file):
            return real(file, mode, *args, **kwargs)
        if not set(mode) & set("wxa+"):
            return real(overlay.to_read(file), mode, *args, **kwargs)
        if "x" in mode and overlay.exists(file):
            raise FileExistsError(f"File exists: {file!r}")
        target = overlay.to_write(file)
        if ("a" in mode or "r" in mode) and overlay.exists(file) and not overlay.has(file):
            _copy(real, file, target)
        return real(target, mode, *args, **kwargs)

    return opened


def _copy(real_open: Callable[..., Any], source: Any, target: str) -> None:
    with real_open(source, "rb") as old, real_open(target, "wb") as new:
        shutil.copyfileobj(old, new)


def _os_open(overlay: _Overlay, real: Callable[..., Any]) -> Callable[..., Any]:
    def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is None and overlay.covers(path):
            writes = flags & _WRITES
            if writes and not overlay.has(path) and overlay.exists(path):
                if flags & os.O_EXCL:
                    raise FileExistsError(f"File exists: {path!r}")
                with contextlib.suppress(IsADirectoryError):
                    _copy(_REAL_OPEN, path, overlay.to_write(path))
            path = overlay.to_write(path) if writes else overlay.to_read(path)
        return int(real(path, flags, mode, dir_fd=dir_fd))

    return opened


def _mkdir(overlay: _Overlay, real: Callable[..., Any]) -> Callable[..., Any]:
    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None or not overlay.covers(path):
            real(path, mode, dir_fd=dir_fd)
            return
        if overlay.exists(path):
            raise FileExistsError(f"File exists: {path!r}")
        real(overlay.to_write(path), mode)

    return mkdir


def _reading(overlay: _Overlay, real: Callable[..., Any]) -> Callable[..., Any]:
    """`stat` and the like: uses the private file if there is one."""

    def read(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir_fd") is None:
            path = overlay.to_read(path)
        return real(path, *args, **kwargs)

    return read


def _changing(overlay: _Overlay, real: Callable[..., Any]) -> Callable[..., Any]:
    """`chmod` and the like: leaves files that are not private as they are."""

    def change(path: Any, *args: Any, **kwargs: Any) -> Any:
        if not overlay.covers(path):
            return real(path, *args, **kwargs)
        return real(overlay.private(path), *args, **kwargs) if overlay.has(path) else None

    return change


def _listdir(overlay: _Overlay, real: Callable[..., Any]) -> Callable[..., Any]:
    def listdir(path: Any = ".") -> Any:
        if not overlay.covers(path) or not (overlay.has(path) or overlay.gone):
            return real(path)
        private = set(real(overlay.private(path))) if overlay.has(path) else set()
        try:
            there = set(real(path))
        except FileNotFoundError:
            if not overlay.has(path):
                raise
            there = set()
        left = {name for name in there if not overlay.is_gone(os.path.join(path, name))}
        return sorted(private | left)

    return listdir


class _Entries(Iterator[Any]):
    """Entries of two folders, merged, with the interface of what `os.scandir` returns."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """There is nothing to close."""


def _scandir(overlay: _Overlay, real: Callable[..., Any]) -> Callable[..., Any]:
    def scandir(path: Any = ".") -> Any:
        if not overlay.covers(path) or not (overlay.has(path) or overlay.gone):
            return real(path)
        entries = list(real(overlay.private(path))) if overlay.has(path) else []
        names = {entry.name for entry in entries}
        with contextlib.suppress(FileNotFoundError):
            entries += [
                entry
                for entry in real(path)
                if entry.name not in names and not overlay.is_gone(entry.path)
            ]
        return _Entries(entries)

    return scandir


def _deleting(overlay: _Overlay, real: Callable[..., Any]) -> Callable[..., Any]:
    """Removes the private file; a real file only disappears from the script's view."""

    def delete(path: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("dir_fd") is not None or not overlay.covers(path):
            real(path, *args, **kwargs)
            return
        if overlay.has(path):
            real(overlay.private(path), *args, **kwargs)
        elif not overlay.exists(path) and not (args or kwargs):
            raise FileNotFoundError(f"No such file or directory: {path!r}")
        overlay.delete(path)

    return delete


def _moving(overlay: _Overlay, real: Callable[..., Any]) -> Callable[..., Any]:
    def move(source: Any, target: Any, **kwargs: Any) -> None:
        if not overlay.covers(target):
            real(overlay.to_read(source), target, **kwargs)
            return
        if overlay.covers(source) and not overlay.has(source):
            if not overlay.exists(source):
                raise FileNotFoundError(f"No such file or directory: {source!r}")
            _copy(_REAL_OPEN, source, overlay.to_write(target))
        else:
            real(overlay.to_read(source), overlay.to_write(target))
        overlay.delete(source)

    return move


_REAL_OPEN = builtins.open

_REPLACED: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (builtins, "open", _open),
    (io, "open", _open),
    (os, "open", _os_open),
    (os, "mkdir", _mkdir),
    (os, "stat", _reading),
    (os, "lstat", _reading),
    (os, "access", _reading),
    (os, "chdir", _reading),
    (os, "listdir", _listdir),
    (os, "scandir", _scandir),
    (os, "remove", _deleting),
    (os, "unlink", _deleting),
    (os, "rmdir", _deleting),
    (shutil, "rmtree", _deleting),
    (os, "rename", _moving),
    (os, "replace", _moving),
    (os, "chmod", _changing),
    (os, "utime", _changing),
    (os, "truncate", _changing),
)
