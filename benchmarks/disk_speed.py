"""How fast tensors go to the disk and back: `python -m benchmarks.disk_speed --folder /some/disk`.

The same tensors go through oomph's disk store, numpy's `tofile` and `fromfile`, and `torch.save`
and `torch.load`, in turns in the same run. A write is timed until the bytes are on the disk, and a
read begins with none of them in the page cache: oomph goes past it, and the others' files are
synced and dropped from it. oomph's time includes checksums of all bytes, made and compared.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from oomph.hardware.measuring import disk_rates
from oomph.memory.disk import DiskStore
from oomph.units import MIB, format_bytes


class Way(ABC):
    """One way to keep tensors on the disk."""

    name: str

    @abstractmethod
    def write(self, tensors: list[Tensor]) -> None:
        """Until they are on the disk."""

    @abstractmethod
    def read(self) -> list[Tensor]:
        """From the disk."""


class Store(Way):
    """oomph: everything is asked for at once, then waited for."""

    def __init__(self, store: DiskStore, like: list[Tensor]) -> None:
        direct = "direct I/O" if store.direct else "through the page cache"
        self.name = f"oomph, {direct}, {'page-aligned' if _aligned(like) else 'other'} memory"
        self._store = store
        self._slots = [store.slot(tensor.nbytes) for tensor in like]
        self._into = [_like(tensor, aligned=_aligned(like)) for tensor in like]

    def write(self, tensors: list[Tensor]) -> None:
        """To the slots."""
        for copy in list(map(self._store.write, self._slots, tensors)):
            copy.finish()

    def read(self) -> list[Tensor]:
        """Into memory that is there already, as in a step."""
        for copy in list(map(self._store.read, self._slots, self._into)):
            copy.finish()
        return self._into


class Files(Way):
    """One file per tensor, synced and dropped from the page cache."""

    def __init__(
        self,
        name: str,
        folder: Path,
        write_one: Callable[[Tensor, Path], None],
        read_one: Callable[[Path], Tensor],
    ) -> None:
        self.name = name
        self._folder, self._write_one, self._read_one = folder, write_one, read_one
        self._paths: list[Path] = []

    def write(self, tensors: list[Tensor]) -> None:
        """One after the other."""
        self._paths = [self._folder / str(index) for index in range(len(tensors))]
        for tensor, path in zip(tensors, self._paths, strict=True):
            self._write_one(tensor, path)
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)

    def read(self) -> list[Tensor]:
        """One after the other, into new memory."""
        return [self._read_one(path) for path in self._paths]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--tensors", type=int, default=8)
    parser.add_argument("--mib", type=int, default=64, help="size of each tensor")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="oomph-", dir=given.folder) as private:
        print(f"{given.tensors} tensors of {given.mib} MiB in {given.folder}, medians, measured")
        compare(Path(private), given.tensors, given.mib * MIB, given.repeats)
        write, read, method = disk_rates(Path(private), seconds=4)
        print(f"{write / 1e9:>10.2f} {read / 1e9:>10.2f}  the disk, one call at a time ({method})")


def compare(folder: Path, count: int, nbytes: int, repeats: int) -> None:
    """All ways in turns, so that what else the machine does hits all of them."""
    plain = [_noise(nbytes, seed, aligned=False) for seed in range(count)]
    pages = [_noise(nbytes, seed, aligned=True) for seed in range(count)]
    store = DiskStore(folder)
    for name in ("numpy", "torch"):
        (folder / name).mkdir()
    ways: list[tuple[Way, list[Tensor]]] = [
        (Store(store, pages), pages),
        (Store(store, plain), plain),
        (
            Files(
                "numpy tofile, fromfile",
                folder / "numpy",
                lambda tensor, path: tensor.numpy().tofile(path),
                lambda path: torch.from_numpy(np.fromfile(path, dtype=np.uint8)),
            ),
            plain,
        ),
        (Files("torch.save, torch.load", folder / "torch", torch.save, _load), plain),
    ]
    writes: dict[str, list[float]] = {way.name: [] for way, _ in ways}
    reads: dict[str, list[float]] = {way.name: [] for way, _ in ways}
    for _ in range(repeats + 1):  # the first warms up
        for way, tensors in ways:
            begun = time.perf_counter()
            way.write(tensors)
            written = time.perf_counter()
            came = way.read()
            reads[way.name].append(time.perf_counter() - written)
            writes[way.name].append(written - begun)
            assert all(map(torch.equal, came, tensors)), f"{way.name} gave back other bytes"
    store.close()
    print(f"write GB/s  read GB/s  {format_bytes(count * nbytes)} by")
    for way, _ in ways:
        write, read = (
            count * nbytes / statistics.median(times[way.name][1:]) / 1e9
            for times in (writes, reads)
        )
        print(f"{write:>10.2f} {read:>10.2f}  {way.name}")


def _load(path: Path) -> Tensor:
    loaded: Tensor = torch.load(path, weights_only=True)
    return loaded


def _noise(nbytes: int, seed: int, *, aligned: bool) -> Tensor:
    """Some disks pack zeros."""
    tensor = _like(torch.empty(nbytes, dtype=torch.uint8, device="meta"), aligned=aligned)
    return tensor.random_(0, 256, generator=torch.Generator().manual_seed(seed))


def _like(tensor: Tensor, *, aligned: bool) -> Tensor:
    """Memory of a tensor's size that has been touched: at a page, as pinned memory is, or not."""
    pages = torch.frombuffer(mmap.mmap(-1, tensor.nbytes + 64), dtype=torch.uint8).zero_()
    return pages[: tensor.nbytes] if aligned else pages[64:]


def _aligned(tensors: list[Tensor]) -> bool:
    return all(tensor.data_ptr() % mmap.PAGESIZE == 0 for tensor in tensors)


if __name__ == "__main__":
    main()
