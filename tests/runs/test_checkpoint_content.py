"""A checkpoint whose checksums are right may still say anything: all of it is looked at first."""

from __future__ import annotations

import copy
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.fuzz.samples import BATCH, checkpoint, new_run
from oomph.errors import BadCheckpoint, BadInput
from oomph.runs.checkpoint_content import fits_closely
from oomph.runs.loading import load_checkpoint
from oomph.runs.nested_state import DEEPEST, put_together, take_apart
from oomph.runs.saving import checksum_of

Change = Callable[[dict[str, Any]], Any]


def edited(folder: Path, change: Change) -> Path:
    """A checkpoint with another content, and the checksum that belongs to it."""
    folder.mkdir()
    for name, content in checkpoint().items():
        (folder / name).write_bytes(content)
    manifest = json.loads(checkpoint()["checkpoint.json"])
    change(manifest["content"])
    manifest["crc32"] = checksum_of(manifest["content"])
    (folder / "checkpoint.json").write_text(json.dumps(manifest))
    return folder


def put(path: str, value: Any) -> Change:
    *parents, last = path.split("/")

    def change(content: dict[str, Any]) -> None:
        at: Any = content
        for parent in parents:
            at = at[int(parent) if isinstance(at, list) else parent]
        if value is KeyError:
            del at[last]
        else:
            at[int(last) if isinstance(at, list) else last] = value

    return change


GROUP = "optimizer/state/param_groups/0"
#: The first parameter's number and what is kept for it.
STATE = "optimizer/state/state/$items/0"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("step", "many"), r"step cannot be 'many'"),
        (put("step", -1), r"step cannot be -1"),
        (put("step", float("nan")), r"step cannot be nan"),
        (put("plan", []), r"plan cannot be \[\]"),
        (put("model/names", [1]), r"model\.names\[0\] cannot be 1"),
        (put("model/strides", KeyError), r"model lacks 'strides'"),
        (put("model/names/0", "nowhere"), "lacks the tensor nowhere"),
        (put("model/extra", [1]), "further state is no table"),
        (put("optimizer/class", 3), r"no optimizer\.class"),
        (put("optimizer/parameters", [["embed.weight"], 3]), r"parameters\[1\] cannot be 3"),
        (put("files/other", {"size": 1, "crc32": "0"}), "names other files"),
        (put("files/model.safetensors", {"size": "1", "crc32": "0"}), "size cannot be '1'"),
        (put("optimizer/state", []), "no optimizer's state"),
        (put("optimizer/state/param_groups", 3), "no param_groups"),
        (put(f"{GROUP}/params", 3), "without params"),
        (put(f"{GROUP}/params", []), "other groups than the manifest"),
        (put("extra", {"$tensor": {}}), "changed into something else"),
        (put("extra", {"$bytes": 3}), "changed into something else"),
        (put("extra", {"$float": "many"}), "changed into something else"),
        (put("extra", {"$items": [[[], 1]]}), "changed into something else"),
        (put("extra", {"$array": "nowhere"}), "lacks the tensor nowhere"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(
    change: Change, words: str, tmp_path: Path
) -> None:
    with pytest.raises(BadCheckpoint, match=words):
        load_checkpoint(edited(tmp_path / "c", change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("random/torch", 3), "random streams"),
        (put("random/python", {"$tuple": [3, [1, 2], None]}), "random streams"),
        (put("random/numpy", {"$tuple": ["MT19937"]}), "random streams"),
        (put("random", None), "random streams"),
        (put("scaler", {"scale": "large"}), "loss scaler"),
        (put("states", {"$bytes": "YQ=="}), "states"),
        (put(f"{GROUP}/lr", "high"), "'lr' as 'high' in the checkpoint, and as 0.1 here"),
        (put(f"{GROUP}/lr", KeyError), "has no lr in the checkpoint"),
        (put(f"{GROUP}/lr", None), "'lr' as None in the checkpoint"),
        (put(f"{GROUP}/betas", {"$tuple": [0.9, None]}), "'betas' as a list of 2"),
        (put(f"{STATE}/1", {"exp_avg": {"a": 1}}), "exp_avg of parameter .* cannot be an object"),
        (put(f"{STATE}/1", {"exp_avg": [1]}), "exp_avg of parameter .* cannot be a list"),
        (put(f"{STATE}/0", 1.0), "1.0, which is no parameter"),
        (put(f"{GROUP}/betas", {"$tuple": [0.9]}), "'betas' as a list of 1"),
        (put(f"{GROUP}/betas", {"$tuple": ["a", 0.9]}), "'betas' as a list of 2"),
    ],
)
def test_what_a_run_could_not_go_on_with_is_refused_before_it_is_touched(
    change: Change, words: str, tmp_path: Path
) -> None:
    run, counted = new_run()
    weights = {name: one.clone() for name, one in run.model.state_dict().items()}
    state = copy.deepcopy(run.optimizer.state_dict())
    stream = torch.get_rng_state()
    with pytest.raises(BadCheckpoint, match=words):
        run.load(edited(tmp_path / "c", change))
    assert all(torch.equal(one, weights[name]) for name, one in run.model.state_dict().items())
    after = run.optimizer.state_dict()
    assert after["param_groups"] == state["param_groups"]
    assert all(
        torch.equal(value, state["state"][at][key])
        for at, one in after["state"].items()
        for key, value in one.items()
    )
    assert torch.equal(torch.get_rng_state(), stream)
    assert (run.steps, run.resumed, counted.state) == (1, None, 3)
    assert run.step(BATCH) > 0
    run.undo()


def test_the_checkpoint_itself_is_taken(tmp_path: Path) -> None:
    assert load_checkpoint(edited(tmp_path / "c", lambda _: None)).step == 1
    run, counted = new_run()
    assert run.load(tmp_path / "c").step == 1
    assert counted.state == 7
    run.undo()


def test_a_tensor_is_used_once(tmp_path: Path) -> None:
    """Or a small file would become copies without end."""

    def again(content: dict[str, Any]) -> None:
        name = content["states"]["counted"]["tensor"]["$tensor"]
        content["extra"] = [{"$tensor": name}] * 2

    with pytest.raises(BadCheckpoint, match="twice"):
        load_checkpoint(edited(tmp_path / "c", again))


@pytest.mark.parametrize("stride", [[1 << 50, 1, 1, 1], [0, 0, 0, 0], [1], [-1, 1, 1, 1], [9] * 4])
def test_strides_take_no_more_memory_than_there_are_numbers(
    stride: list[int], tmp_path: Path
) -> None:
    with pytest.raises(BadCheckpoint, match="stride"):
        load_checkpoint(edited(tmp_path / "c", put("model/strides/image.weight", stride)))


@pytest.mark.parametrize(
    ("shape", "stride", "fits"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), True),
        ((2, 3), (4, 1), False),
        ((2, 3), (1, 1), False),
        ((1, 3), (3, 1), True),
        ((1, 3), (1 << 40, 1), False),
        ((), (), True),
        ((3,), (), False),
        ((2, 3, 4, 5), (60, 1, 15, 3), True),
    ],
)
def test_a_layout_fits_closely_where_no_place_is_left_out(
    shape: tuple[int, ...], stride: tuple[int, ...], fits: bool
) -> None:
    assert fits_closely(shape, stride) is fits


def test_files_elsewhere_are_never_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    def elsewhere(content: dict[str, Any]) -> None:
        content["files"]["../pipe"] = content["files"].pop("model.safetensors")

    with pytest.raises(BadCheckpoint, match="names other files"):
        load_checkpoint(edited(tmp_path / "c", elsewhere))


def test_a_tensor_of_a_type_that_this_pytorch_lacks_is_named(tmp_path: Path) -> None:
    folder = edited(tmp_path / "c", lambda _: None)
    data = (folder / "state.safetensors").read_bytes()
    changed = data.replace(b'"I64"', b'"U64"').replace(b'"U8"', b'"B8"')
    (folder / "state.safetensors").write_bytes(changed)
    manifest = json.loads((folder / "checkpoint.json").read_text())
    manifest["content"]["files"]["state.safetensors"]["crc32"] = f"{zlib.crc32(changed):08x}"
    manifest["crc32"] = checksum_of(manifest["content"])
    (folder / "checkpoint.json").write_text(json.dumps(manifest))
    with pytest.raises(BadCheckpoint, match=r"state\.safetensors"):
        load_checkpoint(folder)


# --- depth ----------------------------------------------------------------------------------------


def nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = ([value], {"a": value}, {5: value}, (value,))[level % 4]
    return value


def test_what_can_be_saved_can_be_loaded_however_deep(tmp_path: Path) -> None:
    run, _ = new_run()
    deep = nested(DEEPEST)
    assert load_checkpoint(run.save(tmp_path, extra=deep)).extra == deep
    with pytest.raises(BadInput, match=f"nested over {DEEPEST} levels"):
        run.save(tmp_path, extra=nested(DEEPEST + 1))
    run.undo()


def test_a_state_without_end_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(BadInput, match="levels deep"):
        take_apart(endless, "extra", {})
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(BadCheckpoint, match="changed into something else"):
        put_together(deep, lambda _: torch.ones(1))
