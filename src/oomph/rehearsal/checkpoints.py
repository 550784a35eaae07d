"""Checkpoints of a rehearsed script: read without their contents, written as empty files.

What they hold is mapped from disk and stays on the host until it is moved to the GPU, which is
rehearsed as any other copy.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

Note = Callable[[str], object]


@contextlib.contextmanager
def hollow_checkpoints(note: Note) -> Iterator[None]:
    """While active, `torch.save`, `torch.load` and safetensors move no contents."""
    with contextlib.ExitStack() as stack:

        def put(owner: Any, name: str, stand_in: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, stand_in))

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
    """The tensors would go to the host one by one, which takes no memory on the GPU."""
    note("checkpoints were not written")
    if not hasattr(file, "write"):
        Path(file).write_bytes(b"")


def _load(load: Callable[..., Any]) -> Callable[..., Any]:
    def loaded(file: Any, map_location: Any = None, **options: Any) -> Any:
        """The file's tensors stay on the host until they are moved to where they belong."""
        on_gpu: set[int] = set()
        everything_to = map_location if isinstance(map_location, (str, torch.device)) else None

        def locate(storage: Any, location: str) -> Any:
            if torch.device(everything_to or location).type == "cuda":
                on_gpu.add(storage._cdata)
            return storage

        def moved(value: Any) -> Any:
            if isinstance(value, Tensor) and value.untyped_storage()._cdata in on_gpu:
                return value.to("cuda")
            return value

        if isinstance(file, (str, Path)):
            options.setdefault("mmap", True)  # contents are not needed: do not read them
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            try:
                found = load(file, map_location=locate, **options)
            except RuntimeError:  # a file of an older format
                found = load(file, map_location=locate, **{**options, "mmap": False})
        return tree_map(moved, found)

    return loaded


class SafeFile:
    """An open safetensors file whose tensors are mapped, not read; moving them is rehearsed.

    Libraries imported meanwhile keep this class; without a rehearsal it is the file itself.
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

    def get_tensor(self, name: str) -> Any:
        """The whole tensor."""
        return self.get_slice(name)[...]

    def get_slice(self, name: str) -> SafeSlice:
        """A tensor of which parts can be taken."""
        return SafeSlice(self._file.get_slice(name), self._device)


class SafeSlice:
    """A tensor in a safetensors file."""

    def __init__(self, part: Any, device: Any) -> None:
        self._part, self._device = part, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __getitem__(self, index: Any) -> Any:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            found = self._part[index]
        return found.to(self._device) if isinstance(found, Tensor) else found
