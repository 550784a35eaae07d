"""How much more host memory a process may take, and how much free space a folder's disk has.

Where a container or a batch system sets a limit, it counts rather than the machine's memory: the
tightest of all limits applies, and is named. File cache that the kernel could drop at once counts
as free. Does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from oomph.errors import BadInput, DiskFull, HostMemoryFull
from oomph.units import KIB, format_bytes

#: File systems whose files are in host memory.
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
#: The capability that lifts the limit on locked memory, as a bit of CapEff.
_CAP_IPC_LOCK = 1 << 14
#: A line of mountinfo: device, mounted part, mount point; file system type and options.
_MOUNT = re.compile(r"^\d+ \d+ (\S+) (\S+) (\S+) .* - (\S+) \S+ (\S+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class HostLimits:
    """What a process may still take, in bytes."""

    memory: int
    """Host memory, not counting swap."""
    memory_limit: str
    """The name of the limit that sets `memory`."""
    lockable: int | None
    """Memory that `mlock` may lock; None if unlimited. CUDA's driver may pin more than that."""
    disk: int | None = None
    """Free space on the disk of the given folder."""
    disk_is_memory: bool = False
    """Whether that folder's files are in host memory, as on a tmpfs."""


def host_limits(folder: Path | None = None, *, root: Path = Path("/")) -> HostLimits:
    """The current limits; `root` is where `proc` and `sys` are found."""
    memory, limit = min(_memory_limits(root), key=lambda found: found[0])
    return HostLimits(
        memory=max(memory, 0),
        memory_limit=limit,
        lockable=_lockable(root),
        disk=None if folder is None else free_disk(folder),
        disk_is_memory=folder is not None and _is_memory(folder, root),
    )


def check_host_memory(needed: int, what: str, limits: HostLimits | None = None) -> None:
    """Raise an error, before allocating, if host memory is too small; `what` begins the message."""
    limits = limits or host_limits()
    missing = needed - limits.memory
    if missing > 0:
        raise HostMemoryFull(
            f"{what} needs {format_bytes(needed)} of host memory, and {limits.memory_limit} leaves"
            f" {format_bytes(limits.memory)}: {format_bytes(missing)} is missing; raise that limit,"
            " end what else takes memory, or let more stay on the GPU or go to the disk",
            missing,
        )


def free_disk(folder: Path) -> int:
    """Bytes that the user may still write to a folder's disk.

    Quotas of projects and file systems are included; a user's quota is not.
    """
    try:
        found = os.statvfs(folder)
    except OSError as error:
        raise BadInput(
            f"cannot use the folder {folder}: {error.strerror}; name one that exists"
        ) from None
    return found.f_bavail * found.f_frsize


def check_disk(needed: int, folder: Path, what: str) -> None:
    """Raise an error, before writing, if the folder's disk is too small."""
    free = free_disk(folder)
    if needed > free:
        raise DiskFull(
            f"{what} needs {format_bytes(needed)} on the disk of {folder}, which has"
            f" {format_bytes(free)} free: {format_bytes(needed - free)} is missing; make room or"
            " name a folder on another disk",
            needed - free,
        )


# --- Memory ---------------------------------------------------------------------------------------


def _memory_limits(root: Path) -> Iterator[tuple[int, str]]:
    """Bytes that each limit leaves, and the limit's name."""
    table = _table(root / "proc/meminfo")
    if "MemAvailable" in table:
        yield table["MemAvailable"] * KIB, "the machine"
    else:
        yield _available_elsewhere(), "the machine"
    yield from _cgroup_limits(root)
    status = _table(root / "proc/self/status")
    for kind, used, name in (
        (resource.RLIMIT_AS, "VmSize", "the limit on address space (ulimit -v)"),
        (resource.RLIMIT_DATA, "VmData", "the limit on data (ulimit -d)"),
    ):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY and used in status:
            yield soft - status[used] * KIB, name


def _lockable(root: Path) -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    status = root / "proc/self/status"
    capable = re.search(r"^CapEff:\s*([0-9a-f]+)$", _text(status), re.MULTILINE)
    if soft == resource.RLIM_INFINITY or (capable and int(capable[1], 16) & _CAP_IPC_LOCK):
        return None
    return max(soft - _table(status).get("VmLck", 0) * KIB, 0)


def _available_elsewhere() -> int:
    """Without /proc: what macOS calls free or could free at once, else the machine's total."""
    try:
        said = subprocess.run(["/usr/bin/vm_stat"], capture_output=True, text=True, check=True)
        return _from_vm_stat(said.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _from_vm_stat(said: str) -> int:
    size = re.search(r"page size of (\d+) bytes", said)
    pages = dict(re.findall(r"^Pages (free|inactive|speculative|purgeable):\s*(\d+)", said, re.M))
    if size is None or "free" not in pages:
        raise ValueError("this is not what vm_stat says")
    return int(size[1]) * sum(map(int, pages.values()))


# --- Control groups -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Version:
    """File names of one version of control groups."""

    limits: tuple[str, ...]
    usage: str
    prefix: str
    """Prefix of the memory.stat lines that include child groups."""


#: Processes above `memory.high` are not killed, but throttled almost to a standstill.
_V2 = _Version(limits=("memory.max", "memory.high"), usage="memory.current", prefix="")
_V1 = _Version(limits=("memory.limit_in_bytes",), usage="memory.usage_in_bytes", prefix="total_")


def _cgroup_limits(root: Path) -> Iterator[tuple[int, str]]:
    """What each group leaves, from the process's own to the outermost visible one."""
    for version, mount, mounted, group in _memory_groups(root):
        below = _below(group, mounted)
        for inner in (below, *below.parents):
            place = mount / inner
            limits = [_number(place / name) for name in version.limits]
            usage = _number(place / version.usage)
            known = [limit for limit in limits if limit is not None]
            if known and usage is not None:
                droppable = _droppable(place / "memory.stat", version.prefix)
                yield (
                    min(known) - max(usage - droppable, 0),
                    f"the memory limit of control group /{'' if inner.name == '' else inner}",
                )


def _memory_groups(root: Path) -> Iterator[tuple[_Version, Path, str, str]]:
    """For each memory hierarchy: its mount point, the part of it mounted there, and our group."""
    groups: dict[str, str] = {}
    for controllers, group in re.findall(
        r"^\d+:([^:]*):(.*)$", _text(root / "proc/self/cgroup"), re.M
    ):
        groups.update(dict.fromkeys(controllers.split(","), group))
    for mount in _mounts(root):
        if mount.kind == "cgroup2" and "" in groups:
            yield _V2, mount.place, mount.part, groups[""]
        elif mount.kind == "cgroup" and "memory" in mount.options and "memory" in groups:
            yield _V1, mount.place, mount.part, groups["memory"]


def _below(group: str, mounted: str) -> PurePosixPath:
    """Our group relative to the mount; the mount itself if a container hides the path between."""
    with contextlib.suppress(ValueError):
        below = PurePosixPath(group).relative_to(mounted)
        if ".." not in below.parts:
            return below
    return PurePosixPath()


def _droppable(stat: Path, prefix: str) -> int:
    """Bytes of cached files that can be dropped without writing them first."""
    table = _table(stat)
    dirty = "dirty" if prefix else "file_dirty"
    writing = "writeback" if prefix else "file_writeback"
    cached = sum(table.get(prefix + name, 0) for name in ("inactive_file", "active_file"))
    return max(cached - sum(table.get(prefix + name, 0) for name in (dirty, writing)), 0)


# --- Mounts and files of the kernel ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Mount:
    kind: str
    place: Path
    part: str
    """The part of the file system that is mounted there."""
    device: str
    options: frozenset[str]


def _mounts(root: Path) -> Iterator[_Mount]:
    for device, part, place, kind, options in _MOUNT.findall(_text(root / "proc/self/mountinfo")):
        yield _Mount(
            kind=kind,
            place=root / _unescaped(place).lstrip("/"),
            part=_unescaped(part),
            device=device,
            options=frozenset(options.split(",")),
        )


def _is_memory(folder: Path, root: Path) -> bool:
    device = folder.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    return any(mount.device == name and mount.kind in _IN_MEMORY for mount in _mounts(root))


def _unescaped(field: str) -> str:
    """Decode the octal escapes that mountinfo uses for spaces and the like."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """A limit or a usage; None for `max`, and where there is no such file."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _table(path: Path) -> dict[str, int]:
    """Parse lines of a name and a number, as in /proc/meminfo and memory.stat."""
    return {name: int(n) for name, n in re.findall(r"^(\w+):?\s+(\d+)\b", _text(path), re.M)}
