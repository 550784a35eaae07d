"""Memory snapshots as PyTorch writes them, made by hand."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from oomph.units import MIB

_FILES = {"train.py": "/home/me/project/train.py", "torch": "/lib/site-packages/torch/nn/f.py"}


def frame(file: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": _FILES.get(file, file), "line": line, "name": name}


#: Shared between events, as PyTorch shares them; innermost first.
LINEAR = [frame("??", 0, "c10::alloc"), frame("torch", 9, "linear"), frame("train.py", 41, "step")]
CACHE = [frame("train.py", 17, "remember")]


def alloc(address: int, size: int, frames: list[Any]) -> dict[str, Any]:
    return {"action": "alloc", "addr": address, "size": size, "stream": 0, "frames": frames}


def free(address: int, size: int, frames: list[Any]) -> list[dict[str, Any]]:
    return [
        {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames}
        for action in ("free_requested", "free_completed")
    ]


def block(size: int, state: str, frames: list[Any]) -> dict[str, Any]:
    return {"size": size, "requested_size": size, "state": state, "frames": frames, "address": 1}


def segment(*blocks: dict[str, Any]) -> dict[str, Any]:
    size = sum(one["size"] for one in blocks)
    return {"device": 0, "address": 1, "total_size": size, "blocks": list(blocks)}


def small_snapshot() -> dict[str, Any]:
    """40 MiB of caches at the end; 100 MiB more on the way, 60 of them of a linear layer."""
    events = [
        alloc(1, 40 * MIB, CACHE),
        alloc(2, 60 * MIB, LINEAR),
        alloc(3, 40 * MIB, CACHE),
        *free(2, 60 * MIB, LINEAR),
        *free(3, 40 * MIB, CACHE),
    ]
    return {
        "segments": [
            segment(block(40 * MIB, "active_allocated", CACHE), block(8 * MIB, "inactive", [])),
            segment(block(100 * MIB, "inactive", LINEAR)),
        ],
        "device_traces": [events, []],
        "allocator_settings": {"expandable_segments": False},
    }


def dump(value: Any, path: Path, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(value, protocol))
    return path
