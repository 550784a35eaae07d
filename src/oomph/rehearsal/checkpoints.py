"""Checkpoints of a rehearsed script: loaded without their contents, saved as empty files.

Loaded tensors are mapped from disk and stay on the host until they are moved to the GPU, which is
rehearsed like any other copy.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oomph.process.rehearsal_threads import replaced_here
from oomph.torch_compat.dispatch import disable_current_modes
from oomph.torch_compat.function_modes import DisableTorchFunction
from oomph.torch_compat.pytree import tree_map
from oomph.torch_compat.storages import cdata_of

Note = Callable[[str], object]


@contextlib.contextmanager
def hollow_checkpoints(note: Note) -> Iterator[None]:
    """While active, `torch.save`, `torch.load` and safetensors transfer no contents."""
    with contextlib.ExitStack() as stack:

        def put(owner: Any, name: str, stand_in: Any) -> None:
            stack.enter_context(replaced_here(owner, name, stand_in))

        put(torch, "save", functools.partial(_save, note))
        put(torch, "load", _load(torch.load))
        if importlib.util.find_spec("safetensors") is not None:
            import safetensors.torch as safetensors
            from safetensors import safe_open as real_safe_open

            for name in {"_flatten", "_flatten_as_ptr"} & vars(safetensors).keys():
                put(safetensors, name, lambda *_: {})
            put(safetensors, "serialize", lambda *_, **__: b"")
            put(safetensors, "serialize_file", lambda _, file, **__: _save(note, None, file))
            for module in list(sys.modules.values()):
                if getattr(module, "__dict__", {}).get("safe_open") is real_safe_open:
                    put(module, "safe_open", functools.partial(SafeFile, real_safe_open))
        yield


def _save(note: Note, _object: Any, file: Any, *_: Any, **__: Any) -> None:
    """Saving copies tensors to the host one by one, which takes no memory on the GPU."""
    note("checkpoints were not written")
    if not hasattr(file, "write"):
        Path(file).write_bytes(b"")


def _load(load: Callable[..., Any]) -> Callable[..., Any]:
    def loaded(file: Any, map_location: Any = None, **options: Any) -> Any:
        """Load the file's tensors to the host, where they stay until they are moved."""
        on_gpu: set[int] = set()

        def locate(storage: Any, location: str) -> Any:
            if torch.device(_wanted(map_location, storage, location)).type == "cuda":
                on_gpu.add(cdata_of(storage))
            return storage

        def moved(value: Any) -> Any:
            if isinstance(value, Tensor) and cdata_of(value.untyped_storage()) in on_gpu:
                return value.to("cuda")
            return value

        if isinstance(file, (str, Path)):
            options.setdefault("mmap", True)  # contents are not needed: do not read them
        with DisableTorchFunction(), disable_current_modes():
            try:
                found = load(file, map_location=locate, **options)
            except RuntimeError:  # a file of an older format
                found = load(file, map_location=locate, **{**options, "mmap": False})
        return tree_map(moved, found)

    return loaded


def _wanted(map_location: Any, storage: Any, location: str) -> Any:
    """The device that `map_location` assigns to a storage saved from `location`."""
    if isinstance(map_location, bytes):
        return map_location.decode()
    if isinstance(map_location, (str, torch.device)):
        return map_location
    if isinstance(map_location, dict):
        return map_location.get(location, location)
    if map_location is None:
        return location
    asked = map_location(_Asked(storage, torch.device("cpu")), location)
    return location if asked is None else asked.device


class _Asked:
    """A storage given to a program's `map_location` function: records a device, but never moves."""

    def __init__(self, storage: Any, device: torch.device) -> None:
        self._storage = storage
        self.device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def cuda(self, device: Any = None, non_blocking: bool = False) -> _Asked:
        return self.to("cuda")

    def cpu(self) -> _Asked:
        return self.to("cpu")

    def to(self, device: Any, non_blocking: bool = False) -> _Asked:
        there = "cuda" if isinstance(device, int) else device
        return _Asked(self._storage, torch.device(there))


class SafeFile:
    """An open safetensors file whose tensors are mapped, not read; moving them is rehearsed.

    Libraries imported meanwhile keep this class; outside a rehearsal it acts as the file itself.
    """

    def __init__(
        self,
        open_file: Callable[..., Any],
        filename: Any,
        framework: str = "pt",
        device: Any = "cpu",
        **_: Any,
    ) -> None:
        self._file = open_file(filename, framework=framework, device="cpu")
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> SafeFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def get_tensors(self) -> dict[str, Any]:
        """All tensors by name, as newer versions of `load_file` request them."""
        names = self._file.keys()
        return {name: self.get_tensor(name) for name in names}

    def get_tensor(self, name: str) -> Any:
        """The whole tensor."""
        return self.get_slice(name)[...]

    def get_slice(self, name: str) -> SafeSlice:
        """A tensor from which parts can be read."""
        return SafeSlice(self._file.get_slice(name), self._device)


class SafeSlice:
    """A tensor in a safetensors file."""

    def __init__(self, part: Any, device: Any) -> None:
        self._part, self._device = part, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __getitem__(self, index: Any) -> Any:
        with DisableTorchFunction(), disable_current_modes():
            found = self._part[index]
        return found.to(self._device) if isinstance(found, Tensor) else found
