"""Foreign safetensors files are held against the model before anything of them is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from oomph.errors import BadCheckpoint, WrongCheckpoint
from oomph.runs.weight_files import WeightFiles


class Tied(nn.Module):
    """A head that is the embedding, a saved buffer and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("angles", torch.randn(3), persistent=False)


def on_meta() -> Tied:
    with torch.device("meta"):
        return Tied()


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Each of a model's tensors once, as safetensors wants it."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state.pop("head.weight")
    return state


def write_shards(folder: Path, state: dict[str, Tensor], **changes: Any) -> None:
    names = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(state)}
    for file in set(names.values()):
        save_file({name: state[name] for name in state if names[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": names | changes}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def assert_matches(path: Path) -> None:
    model, expected = on_meta(), Tied().state_dict()
    found = WeightFiles(path).match(model)
    known = dict([*model.named_parameters(), *model.named_buffers()])
    assert len(found) == len(expected) - 1
    for name in expected.keys() - {"head.weight"}:
        assert torch.equal(found[known[name]], expected[name])


def test_a_file_a_folder_and_shards_are_read(tmp_path: Path) -> None:
    one, named, shards = (tmp_path / name for name in ("one", "named", "shards"))
    for folder in (one, named, shards):
        folder.mkdir()
    save_file(tensors(Tied()), one / "weights.safetensors")
    save_file(tensors(Tied()), named / "model.safetensors")
    save_file({"other": torch.ones(1)}, named / "adapter.safetensors")
    write_shards(shards, tensors(Tied()))
    for path in (one, one / "weights.safetensors", named, shards):
        assert_matches(path)
    assert_matches(shards / "model.safetensors.index.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("norm.weight"), r"lacks norm\.weight$"),
        (lambda state: state.pop("norm.running_var"), r"lacks norm\.running_var$"),
        (lambda state: state.pop("embed.weight"), r"lacks embed\.weight$"),
        (lambda state: state.update(tail=torch.ones(1)), "has tail, which Tied lacks"),
        (lambda state: state.update(angles=torch.ones(3)), "has angles, which Tied lacks"),
        (
            lambda state: state.update({"norm.bias": torch.ones(5)}),
            r"norm\.bias is \[5\] in .*, and \[4\] in the model",
        ),
        (
            lambda state: state.update({"embed.weight": state["embed.weight"].bfloat16()}),
            r"embed\.weight is bfloat16 in .*, and float32 in the model",
        ),
        (
            lambda state: state.update({"head.weight": state["embed.weight"] + 1}),
            r"embed\.weight and head\.weight are one weight of the model, and two in",
        ),
    ],
)
def test_the_first_difference_is_named(change: Any, said: str, tmp_path: Path) -> None:
    state = tensors(Tied())
    change(state)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(WrongCheckpoint, match=said):
        WeightFiles(tmp_path).match(on_meta())


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_weight_in_several_places_need_be_there_once(name: str, tmp_path: Path) -> None:
    model, state = Tied(), tensors(Tied())
    state[name] = state.pop("embed.weight")
    save_file(state, tmp_path / "model.safetensors")
    found = WeightFiles(tmp_path).match(model)
    assert torch.equal(found[model.head.weight], Tied().embed.weight)


def test_a_weight_that_is_tied_after_loading_is_tied_again(tmp_path: Path) -> None:
    class TiesLater(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight = nn.Parameter(torch.zeros(7, 4))

        def tie_weights(self) -> None:
            self.head.weight = self.embed.weight

    model = TiesLater()
    save_file(tensors(Tied()), tmp_path / "model.safetensors")
    found = WeightFiles(tmp_path).match(model)
    assert model.head.weight is model.embed.weight
    assert torch.equal(found[model.head.weight], Tied().embed.weight)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "no safetensors file"),
        ({"a.safetensors": b"", "b.safetensors": b""}, "2 safetensors files and no index"),
        ({"model.safetensors": b"not one"}, "is no safetensors file"),
        ({"model.safetensors.index.json": b"{"}, "cannot be read"),
        ({"model.safetensors.index.json": b"[1]"}, "no index of safetensors"),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": 1}}'}, "no index of safetensors"),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "../a.safetensors"}}'},
            "not beside it",
        ),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "a.safetensors"}}'},
            "is no safetensors file",
        ),
        (
            {"x.safetensors.index.json": b"{}", "y.safetensors.index.json": b"{}"},
            "several indices",
        ),
    ],
)
def test_what_is_no_checkpoint_is_refused(
    files: dict[str, bytes], said: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BadCheckpoint, match=said):
        WeightFiles(tmp_path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="nowhere"):
        WeightFiles(tmp_path / "nowhere.safetensors")


def test_shards_that_are_not_as_their_index_says_are_refused(tmp_path: Path) -> None:
    state = tensors(Tied())
    write_shards(tmp_path, state, more="model-0.safetensors")
    with pytest.raises(BadCheckpoint, match=r"has more in model-0\.safetensors, which lacks it"):
        WeightFiles(tmp_path)
    write_shards(tmp_path, state)
    save_file({"extra": torch.ones(1), **state}, tmp_path / "model-0.safetensors")
    with pytest.raises(BadCheckpoint, match=r"model-0\.safetensors has .*, which .* lacks"):
        WeightFiles(tmp_path)
