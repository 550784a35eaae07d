"""How much host memory and disk there is: the tightest limit counts, and is named."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from oomph.errors import BadInput, DiskFull, HostMemoryFull
from oomph.memory import limits
from oomph.memory.limits import HostLimits, check_disk, check_host_memory, free_disk, host_limits
from oomph.units import GIB, KIB, MIB

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 {part} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def write(root: Path, name: str, text: str | int) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 10 GiB available and no other limit."""
    write(tmp_path, "proc/meminfo", f"MemTotal: 99999999 kB\nMemAvailable: {10 * GIB // KIB} kB")
    write(tmp_path, "proc/self/status", "VmSize:\t2097152 kB\nVmData:\t1048576 kB\nVmLck:\t64 kB")
    set_limits(monkeypatch, {})
    return tmp_path


def set_limits(monkeypatch: pytest.MonkeyPatch, soft: dict[int, int]) -> None:
    def getrlimit(kind: int) -> tuple[int, int]:
        return soft.get(kind, resource.RLIM_INFINITY), resource.RLIM_INFINITY

    monkeypatch.setattr(resource, "getrlimit", getrlimit)


def v2(root: Path, group: str, **files: str | int) -> None:
    for name, text in files.items():
        write(root, f"sys/fs/cgroup/{group}/memory.{name}", text)


def use_v2(root: Path, group: str) -> None:
    write(root, "proc/self/cgroup", f"0::{group}")
    write(root, "proc/self/mountinfo", V2_MOUNT)


# --- Memory ---------------------------------------------------------------------------------------


def test_without_other_limits_the_machine_is_the_limit(root: Path) -> None:
    found = host_limits(root=root)
    assert (found.memory, found.memory_limit) == (10 * GIB, "the machine")
    assert found.disk is None and not found.disk_is_memory


def test_a_control_group_leaves_its_limit_less_what_is_used(root: Path) -> None:
    use_v2(root, "/job")
    v2(root, "job", max=4 * GIB, current=GIB, stat="anon 1\n")
    found = host_limits(root=root)
    assert found.memory == 3 * GIB
    assert found.memory_limit == "the memory limit of control group /job"


def test_cached_files_that_can_be_dropped_at_once_count_as_free(root: Path) -> None:
    use_v2(root, "/job")
    stat = f"inactive_file {GIB}\nactive_file {GIB}\nfile_dirty {MIB}\nfile_writeback {2 * MIB}"
    v2(root, "job", max=4 * GIB, current=3 * GIB, stat=stat)
    assert host_limits(root=root).memory == 3 * GIB - 3 * MIB


def test_of_nested_groups_the_tightest_wins(root: Path) -> None:
    use_v2(root, "/outer/middle/inner")
    v2(root, "outer/middle/inner", max="max", current=GIB, stat="")
    v2(root, "outer/middle", max=3 * GIB, current=2 * GIB, stat="")
    v2(root, "outer", max=8 * GIB, current=2 * GIB, stat="")
    found = host_limits(root=root)
    assert found.memory == GIB
    assert found.memory_limit == "the memory limit of control group /outer/middle"


def test_a_group_is_slowed_down_at_its_high_mark_so_that_is_its_limit(root: Path) -> None:
    use_v2(root, "/job")
    v2(root, "job", max=4 * GIB, high=2 * GIB, current=GIB, stat="")
    assert host_limits(root=root).memory == GIB


def test_a_group_over_its_limit_leaves_nothing(root: Path) -> None:
    use_v2(root, "/job")
    v2(root, "job", max=GIB, current=2 * GIB, stat="")
    assert host_limits(root=root).memory == 0


@pytest.mark.parametrize("group", ["/", "/../../elsewhere"])
def test_inside_a_container_the_mount_is_the_group(root: Path, group: str) -> None:
    use_v2(root, group)
    v2(root, ".", max=5 * GIB, current=GIB, stat="")
    found = host_limits(root=root)
    assert (found.memory, found.memory_limit) == (
        4 * GIB,
        "the memory limit of control group /",
    )


def v1(root: Path, group: str, *, limit: int, usage: int, stat: str = "") -> None:
    folder = f"sys/fs/cgroup/memory/{group}"
    write(root, f"{folder}/memory.limit_in_bytes", limit)
    write(root, f"{folder}/memory.usage_in_bytes", usage)
    write(root, f"{folder}/memory.stat", stat)


def test_the_first_version_of_control_groups_is_understood(root: Path) -> None:
    write(root, "proc/self/cgroup", "5:devices:/x\n4:cpu,memory:/batch/job\n0::/")
    write(root, "proc/self/mountinfo", V1_MOUNT.format(part="/"))
    v1(root, "", limit=9223372036854771712, usage=7 * GIB)
    v1(root, "batch", limit=6 * GIB, usage=GIB)
    stat = f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_dirty {MIB}"
    v1(root, "batch/job", limit=2 * GIB, usage=2 * GIB, stat=stat)
    found = host_limits(root=root)
    assert found.memory == GIB - MIB
    assert found.memory_limit == "the memory limit of control group /batch/job"


def test_a_container_of_the_first_version_mounts_only_its_own_group(root: Path) -> None:
    write(root, "proc/self/cgroup", "4:memory:/docker/abc/inner")
    write(root, "proc/self/mountinfo", V1_MOUNT.format(part="/docker/abc"))
    v1(root, "", limit=3 * GIB, usage=GIB)
    v1(root, "inner", limit=3 * GIB, usage=2 * GIB)
    assert host_limits(root=root).memory == GIB


def test_mount_points_may_have_spaces(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/job")
    write(root, "proc/self/mountinfo", r"30 23 0:26 / /my\040groups rw - cgroup2 none rw")
    write(root, "my groups/job/memory.max", 2 * GIB)
    write(root, "my groups/job/memory.current", GIB)
    assert host_limits(root=root).memory == GIB


@pytest.mark.parametrize(
    ("kind", "memory", "name"),
    [(resource.RLIMIT_AS, 2 * GIB, "ulimit -v"), (resource.RLIMIT_DATA, 3 * GIB, "ulimit -d")],
)
def test_the_limits_of_the_process_count(
    root: Path, monkeypatch: pytest.MonkeyPatch, kind: int, memory: int, name: str
) -> None:
    set_limits(monkeypatch, {kind: 4 * GIB})
    found = host_limits(root=root)
    assert found.memory == memory
    assert name in found.memory_limit


def test_locked_memory_has_a_limit_unless_the_process_may_ignore_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert host_limits(root=root).lockable is None
    set_limits(monkeypatch, {resource.RLIMIT_MEMLOCK: 8 * MIB})
    assert host_limits(root=root).lockable == 8 * MIB - 64 * KIB
    write(root, "proc/self/status", "CapEff:\t0000000000004000")
    assert host_limits(root=root).lockable is None


def test_macos_says_its_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"
        "Pages free:                       1000.\nPages active:    99999.\n"
        "Pages inactive:   20.\nPages speculative:   3.\nPages purgeable:   4.\n"
    )
    assert limits._from_vm_stat(said) == 1027 * 16384
    with pytest.raises(ValueError, match="vm_stat"):
        limits._from_vm_stat("nonsense")


def test_where_nobody_tells_all_of_the_memory_is_the_limit(tmp_path: Path) -> None:
    assert host_limits(root=tmp_path / "nothing").memory > 0


def test_this_machine_has_limits_that_make_sense(tmp_path: Path) -> None:
    found = host_limits(tmp_path)
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < found.memory <= physical
    assert found.disk is not None and found.disk > 0


# --- Checks ---------------------------------------------------------------------------------------

SMALL = HostLimits(memory=GIB, memory_limit="the memory limit of control group /job", lockable=None)


def test_too_little_host_memory_is_refused_with_what_is_missing() -> None:
    with pytest.raises(HostMemoryFull, match=r"optimizer state needs 3\.00 GiB") as caught:
        check_host_memory(3 * GIB, "optimizer state", SMALL)
    assert caught.value.missing == 2 * GIB
    assert "control group /job leaves 1.00 GiB: 2.00 GiB is missing" in str(caught.value)


def test_what_just_fits_is_not_refused() -> None:
    check_host_memory(GIB, "optimizer state", SMALL)


def test_more_than_this_machine_has_is_refused() -> None:
    with pytest.raises(HostMemoryFull):
        check_host_memory(1 << 60, "everything")


def test_too_little_disk_is_refused_with_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "free_disk", lambda folder: GIB)
    check_disk(GIB, tmp_path, "weights")
    with pytest.raises(DiskFull, match=r"weights needs 1\.50 GiB on the disk") as caught:
        check_disk(GIB + GIB // 2, tmp_path, "weights")
    assert caught.value.missing == GIB // 2


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file or directory; name one that exists"):
        free_disk(tmp_path / "missing")


def test_a_folder_in_memory_is_no_disk(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    line = "9 1 {0}:{1} / /x rw - {2} none rw"
    for kind, is_memory in (("ext4", False), ("tmpfs", True)):
        text = line.format(os.major(device), os.minor(device), kind)
        write(tmp_path, "proc/self/mountinfo", text)
        assert host_limits(tmp_path, root=tmp_path).disk_is_memory is is_memory
