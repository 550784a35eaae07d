"""Every loader of files, what it is given, and what is done with what it read.

A case is a number: the same number damages the same sample in the same way. What was read is used
as oomph uses it: printed, written as JSON, shown on a page, compared, given to a model.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import oomph
from benchmarks.fuzz import samples
from benchmarks.fuzz.damage import damage_bytes, damage_pickle, damage_value, to_json
from oomph.errors import OomphError
from oomph.explaining.snapshots import parse_snapshot
from oomph.hardware import find_gpu
from oomph.hardware.catalogue import parse_gpus
from oomph.hardware.prices import load_prices
from oomph.hardware.profile import load_profile
from oomph.jobs.models.building import model_from_config_path
from oomph.jobs.models.catalogue import parse_models
from oomph.plans.plan import Plan
from oomph.report.exports.plain import timeline_from_json
from oomph.report.page.document import render_page
from oomph.report.page.sources import page_of_explanation, page_of_plan
from oomph.runs.elastic import Elastic, Elasticity
from oomph.runs.loading import load_checkpoint
from oomph.runs.saving import checksum_of
from oomph.runs.weight_files import WeightFiles

Files = Mapping[str, bytes]


@dataclass(frozen=True, kw_only=True)
class Loader:
    """One kind of file, damaged by a seed, and read."""

    name: str
    damaged: Callable[[random.Random], Files]
    """Files by name."""
    use: Callable[[Path], object]
    """Reads them from a folder, and does with them what oomph does; raises `OomphError` alone."""
    cases_in_tests: int = 1000


def _text_or_value(value: Any, rng: random.Random) -> bytes:
    """JSON of a damaged value, or damaged JSON of a value; seldom both."""
    kind = rng.random()
    text = to_json(damage_value(value, rng)) if kind < 0.75 else json.dumps(value).encode()
    return damage_bytes(text, rng) if kind > 0.7 else text


# --- plans and reports ----------------------------------------------------------------------------


def _damaged_plan(rng: random.Random) -> Files:
    return {"plan.json": _text_or_value(samples.reports()[2], rng)}


def _use_plan(folder: Path) -> None:
    plan = Plan.load(folder / "plan.json")
    str(plan).encode()
    render_page(page_of_plan(plan)).encode()
    plan.save(folder / "again.json")
    assert Plan.load(folder / "again.json") == plan


def _damaged_report(rng: random.Random) -> Files:
    return {"report.json": _text_or_value(rng.choice(samples.reports()), rng)}


def _use_report(folder: Path) -> None:
    found = oomph.explain(folder / "report.json")
    str(found).encode()
    json.dumps(found.as_dict(), allow_nan=False)
    render_page(page_of_explanation(found)).encode()
    compared = oomph.compare(found, samples.estimate(), fail_above="2%")
    str(compared).encode()
    json.dumps(compared.as_dict(), allow_nan=False)


def _damaged_snapshot(rng: random.Random) -> Files:
    return {"report.json": damage_pickle(samples.SNAPSHOT, rng)}


def _use_snapshot(folder: Path) -> None:
    parse_snapshot(io.BytesIO((folder / "report.json").read_bytes()))
    _use_report(folder)


def _damaged_trace(rng: random.Random) -> Files:
    text = _text_or_value(samples.TRACE, rng)
    match rng.randrange(4):
        case 0:
            return {"report.json": text}
        case 1:
            return {"report.json": damage_bytes(gzip.compress(text, 1), rng)}
        case 2:
            packed = zlib.compress(text, 1)  # of another kind than its name says
            return {"report.json": b"\x1f\x8b\x08\x00" + packed}
        case _:
            return {"report.json": gzip.compress(text, 1)}


def _damaged_timeline(rng: random.Random) -> Files:
    if rng.random() < 0.2:
        return {"timeline.json": damage_bytes(samples.timeline(), rng)}
    return {"timeline.json": to_json(damage_value(json.loads(samples.timeline()), rng))}


def _use_timeline(folder: Path) -> None:
    timeline = timeline_from_json((folder / "timeline.json").read_bytes())
    events = list(timeline.stream_of_events())
    for at in (0, timeline.events // 2, timeline.events):
        timeline.alive_at(at)
        timeline.span_at(at)
    assert len(events) >= len(timeline.blocks)


# --- tables ---------------------------------------------------------------------------------------


def _damaged_profile(rng: random.Random) -> Files:
    return {"oomph/gpus/h200.json": _text_or_value(samples.PROFILE.as_dict(), rng)}


def _use_profile(folder: Path) -> None:
    before = os.environ.get("XDG_CONFIG_HOME")
    os.environ["XDG_CONFIG_HOME"] = str(folder)
    try:
        profile = load_profile("h200")
        if profile is not None:
            profile.efficiency(find_gpu("h200"))
            json.dumps(profile.as_dict(), allow_nan=False)
    finally:
        del os.environ["XDG_CONFIG_HOME"]
        if before is not None:
            os.environ["XDG_CONFIG_HOME"] = before


def _damaged_text(text: str) -> Callable[[random.Random], Files]:
    words = ("nan", "inf", "-1", "1e400", "[]", "{}", '"x"', "true", "9" * 30, "1979-05-27", "''")

    def damaged(rng: random.Random) -> Files:
        lines = text.splitlines()
        for _ in range(rng.choice((0, 1, 2))):
            at = rng.randrange(len(lines))
            name, _, value = lines[at].partition(" = ")
            lines[at] = rng.choice(
                (f"{name} = {rng.choice(words)}", "", f"{lines[at]}\n{lines[at]}", f"x{lines[at]}",
                 f"{name} = [{value}]", f"{'.'.join([name] * 60)} = {value}")
            )  # fmt: skip
        found = "\n".join(lines).encode()
        return {"table.toml": damage_bytes(found, rng) if rng.random() < 0.6 else found}

    return damaged


def _as_text(parse: Callable[[str], Any]) -> Callable[[Path], object]:
    return lambda folder: parse((folder / "table.toml").read_bytes().decode("utf-8", "replace"))


def _damaged_config(rng: random.Random) -> Files:
    return {"config.json": _text_or_value(samples.CONFIG, rng)}


def _damaged_limit(rng: random.Random) -> Files:
    return {"limit": damage_bytes(rng.choice((b"12GiB\n", b"1.5e3 MB", b"900 kib")), rng)}


def _use_limit(folder: Path) -> None:
    limit = Elasticity(Elastic(ask=folder / "limit"), torch.device("cpu"), None)._limit(7)
    assert limit.nbytes > 0


# --- checkpoints and weights ----------------------------------------------------------------------


def _damaged_checkpoint(rng: random.Random) -> Files:
    """Damaged below its checksums, which are those of the damaged content, or above them."""
    files = dict(samples.checkpoint())
    name = rng.choice(("checkpoint.json",) * 5 + tuple(files))
    if name == "checkpoint.json" and rng.random() < 0.9:
        manifest = json.loads(files[name])
        content = damage_value(manifest["content"], rng)
        manifest["content"] = content
        manifest["crc32"] = checksum_of(content) if isinstance(content, dict) else "0"
        files[name] = to_json(manifest) if rng.random() < 0.95 else damage_bytes(files[name], rng)
        return files
    files[name] = damage_safetensors(files[name], rng) if "tensors" in name else files[name]
    if name != "checkpoint.json" and rng.random() < 0.9:
        manifest = json.loads(files["checkpoint.json"])
        manifest["content"]["files"][name] = {
            "size": len(files[name]),
            "crc32": f"{zlib.crc32(files[name]):08x}",
        }
        manifest["crc32"] = checksum_of(manifest["content"])
        files["checkpoint.json"] = to_json(manifest)
    elif rng.random() < 0.5:
        files[name] = damage_bytes(files[name], rng)
    return files


def damage_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Its header as JSON, or its bytes."""
    size = int.from_bytes(data[:8], "little")
    if rng.random() < 0.3 or len(data) < 8 + size:
        return damage_bytes(data, rng)
    header = json.loads(data[8 : 8 + size])
    for entry in header.values():
        if isinstance(entry, dict) and "dtype" in entry and rng.random() < 0.1:
            types = ("F64", "F16", "BF16", "I8", "F8_E4M3", "F4", "F6_E2M3", "E8M0", "C64", "X", "")
            entry["dtype"] = rng.choice(types)
    text = to_json(damage_value(header, rng))
    if rng.random() < 0.8:
        text += b" " * (-len(text) % 8)
    length = len(text) if rng.random() < 0.95 else rng.choice((0, 7, 2**31, 2**63, len(data)))
    return length.to_bytes(8, "little") + text + data[8 + size :]


def _use_checkpoint(folder: Path) -> None:
    found = load_checkpoint(folder)
    assert found.step >= 0
    repr(found.extra)


class _Loaded:
    """A run that damaged checkpoints are given to; a refusal leaves it as it was."""

    def __init__(self) -> None:
        self._run: Any = None
        self._counted: Any = None

    def use(self, folder: Path) -> None:
        if self._run is None:
            self._run, self._counted = samples.new_run()
        before = self._seen()
        try:
            self._run.load(folder)
        except OomphError:
            after = self._seen()
            assert _equal(before, after), "a refused checkpoint changed the run"
            raise
        except BaseException:
            self._run = None
            raise
        after = self._seen()
        if _switches(before[2]) != _switches(after[2]):
            self._run = None  # a checkpoint may say fused=True, and PyTorch where that can be
            return
        try:
            self._run.step(samples.BATCH)
        except BaseException:
            self._run = None
            raise

    def _seen(self) -> list[Any]:
        run = self._run
        model = {name: one.clone() for name, one in run.model.state_dict().items()}
        optimizer = run.optimizer.state_dict()
        state = {
            (at, key): value.clone() if isinstance(value, torch.Tensor) else value
            for at, one in optimizer["state"].items()
            for key, value in one.items()
        }
        groups = [dict(group) for group in optimizer["param_groups"]]
        return [model, state, groups, run.steps, self._counted.state, torch.get_rng_state()]


def _switches(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What an optimizer's groups switch on and off."""
    return [
        {name: value for name, value in group.items() if isinstance(value, bool | None)}
        for group in groups
    ]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and np.array_equal(one, other, equal_nan=True)
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and bool(torch.equal(one.nan_to_num(), other.nan_to_num()))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other or (one != one and other != other))


def _damaged_weights(rng: random.Random) -> Files:
    files = dict(samples.weights())
    name = rng.choice(list(files))
    if name.endswith(".json"):
        files[name] = _text_or_value(json.loads(files[name]), rng)
    else:
        files[name] = damage_safetensors(files[name], rng)
    return files


def _use_weights(folder: Path) -> None:
    with torch.device("meta"):
        model = samples.Net()
    model.head.weight = model.embed.weight
    for mine, found in WeightFiles(folder).match(model).items():
        assert mine.shape == found.shape
        found.clone()


LOADERS = {
    one.name: one
    for one in (
        Loader(name="plan", damaged=_damaged_plan, use=_use_plan),
        Loader(name="report", damaged=_damaged_report, use=_use_report),
        Loader(name="snapshot", damaged=_damaged_snapshot, use=_use_snapshot),
        Loader(name="trace", damaged=_damaged_trace, use=_use_report),
        Loader(name="timeline", damaged=_damaged_timeline, use=_use_timeline),
        Loader(name="profile", damaged=_damaged_profile, use=_use_profile),
        Loader(
            name="prices",
            damaged=_damaged_text(samples.PRICES),
            use=lambda folder: load_prices(folder / "table.toml"),
        ),
        Loader(name="cards", damaged=_damaged_text(samples.GPUS), use=_as_text(parse_gpus)),
        Loader(name="models", damaged=_damaged_text(samples.MODELS), use=_as_text(parse_models)),
        Loader(
            name="config",
            damaged=_damaged_config,
            use=lambda folder: model_from_config_path(folder / "config.json"),
        ),
        Loader(name="limit", damaged=_damaged_limit, use=_use_limit),
        Loader(name="checkpoint", damaged=_damaged_checkpoint, use=_use_checkpoint),
        Loader(name="run", damaged=_damaged_checkpoint, use=_Loaded().use),
        Loader(name="weights", damaged=_damaged_weights, use=_use_weights),
    )
}
