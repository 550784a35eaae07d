"""Reads a model's weights from safetensors files by other writers, and matches them to the model.

They come as a file, a folder with one, or a folder of shards with their index. Files are
memory-mapped, so a tensor's bytes are read when they are copied, and a model larger than host
memory can be read tensor by tensor. Everything is checked before anything is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from oomph.errors import BadCheckpoint, WrongCheckpoint
from oomph.files.plain_json import BadJson, parse_json
from oomph.files.reading import read_regular
from oomph.quoting import brief
from oomph.runs.tensor_files import MappedTensors
from oomph.torch_compat.modules import buffers_of, parameters_of, unsaved_buffers_of

_FILE, _INDEX = "model.safetensors", "*.safetensors.index.json"
#: Largest index; those of the largest models have a tenth.
_MOST_INDEX = 64 << 20


class WeightFiles:
    """The tensors of a checkpoint by name, as views of its files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        index = _index_of(path)
        if index is None:
            only = MappedTensors(_only_file(path))
            self._files = dict.fromkeys(sorted(only.names), only)
        else:
            self._files = _shards(index)

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name][name]

    def match(self, model: nn.Module) -> dict[Tensor, Tensor]:
        """By parameter and saved buffer of a model: the tensor to load into it.

        `WrongCheckpoint` names the first that is missing, left over, or of another shape or dtype.
        A weight that the model uses in several places needs to be in the files only once.
        """
        wanted = _places(model)
        if any(self._names(places) == [] for places in wanted.values()):
            _tie_again(model)
            wanted = _places(model)
        known = {name for places in wanted.values() for name in places}
        for name in self._files:
            if name not in known:
                raise WrongCheckpoint(f"{self.path} has {name}, which {type(model).__name__} lacks")
        return {tensor: self._matching(tensor, places) for tensor, places in wanted.items()}

    def _names(self, places: Iterable[str]) -> list[str]:
        return [name for name in places if name in self._files]

    def _matching(self, tensor: Tensor, places: Sequence[str]) -> Tensor:
        names = self._names(places)
        if not names:
            raise WrongCheckpoint(f"{self.path} lacks {places[0]}")
        for name in names:
            found = self[name]
            if found.shape != tensor.shape:
                raise WrongCheckpoint(
                    f"{name} is {list(found.shape)} in {self.path}, and {list(tensor.shape)} in the"
                    " model"
                )
            if found.dtype != tensor.dtype:
                raise WrongCheckpoint(
                    f"{name} is {_type(found)} in {self.path}, and {_type(tensor)} in the model:"
                    " build the model in that type"
                )
        for name in names[1:]:
            if not torch.equal(self[name], self[names[0]]):
                raise WrongCheckpoint(
                    f"{names[0]} and {name} are one weight of the model, and two in {self.path}"
                )
        return self[names[0]]


def _places(model: nn.Module) -> dict[Tensor, list[str]]:
    """By parameter and saved buffer: its names in the model."""
    found: dict[Tensor, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        unsaved = unsaved_buffers_of(module)
        for name, tensor in [*parameters_of(module).items(), *buffers_of(module).items()]:
            if tensor is not None and name not in unsaved:
                found.setdefault(tensor, []).append(f"{path}.{name}" if path else name)
    return found


def _tie_again(model: nn.Module) -> None:
    """Tie weights, as transformers models tie head and embedding after loading."""
    tie = getattr(model, "tie_weights", None)
    if callable(tie):
        tie()


def _index_of(path: Path) -> Path | None:
    """The index of the shards, if there is one."""
    if path.name.endswith(".json"):
        return path
    if not path.is_dir() or (path / _FILE).exists():
        return None
    found = sorted(path.glob(_INDEX))
    if len(found) > 1:
        raise BadCheckpoint(f"{path} has several indices: name one of them, as {found[0].name}")
    return found[0] if found else None


def _only_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    if (path / _FILE).exists():
        return path / _FILE
    found = sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        what = f"{len(found)} safetensors files and no index" if found else "no safetensors file"
        raise BadCheckpoint(f"{path} has {what}: name a file, or a folder with {_FILE}")
    return found[0]


def _shards(index: Path) -> dict[str, MappedTensors]:
    """By tensor name: the shard that has it."""
    try:
        content = parse_json(read_regular(index, most=_MOST_INDEX))
    except OSError as error:
        raise BadCheckpoint(f"{index} cannot be read: {error.strerror}") from None
    except BadJson as error:
        raise BadCheckpoint(f"{index} cannot be read: {error}") from None
    named = content.get("weight_map") if isinstance(content, Mapping) else None
    if not isinstance(named, Mapping) or not all(isinstance(file, str) for file in named.values()):
        raise BadCheckpoint(f"{index} is no index of safetensors: it has no weight_map of names")
    files: dict[str, MappedTensors] = {}
    for file in sorted(set(named.values())):
        if Path(file).name != file:
            raise BadCheckpoint(f"{index} names {brief(file)}, which is not beside it")
        files[file] = MappedTensors(index.parent / file)
    for name, file in named.items():
        if name not in files[file].names:
            raise BadCheckpoint(f"{index} has {name} in {file}, which lacks it")
    for file, mapped in files.items():
        if extra := sorted(name for name in mapped.names if named.get(name) != file):
            raise BadCheckpoint(f"{index.parent / file} has {extra[0]}, which {index.name} lacks")
    return {name: files[file] for name, file in named.items()}


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
