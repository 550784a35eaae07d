"""GPUs by name, from catalogue.toml: capacity, bandwidths and rates, with no GPU and no torch."""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from oomph.errors import BadInput, UnknownName
from oomph.units import parse_bytes

SCHEMA = 1
VENDORS = ("nvidia", "amd")
RATE_DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")


@dataclass(frozen=True, kw_only=True)
class GPU:
    """One card: what it holds and how fast it is."""

    name: str
    vendor: str
    """`nvidia` or `amd`."""
    architecture: str
    compute_capability: tuple[int, int] | None
    """CUDA's; None on AMD."""
    sm_count: int
    """Streaming multiprocessors, or compute units on AMD."""
    memory: int
    """Bytes a process sees in total, as the driver reports it: less than the number on the box."""
    memory_bandwidth: float
    """Bytes per second, theoretical."""
    host_link: float
    """Bytes per second in each direction between host and card, theoretical."""
    rates: Mapping[str, float] = field(hash=False)
    """Dense flop/s of a matrix product by dtype (`RATE_DTYPES`); absent where unsupported."""
    aliases: tuple[str, ...] = ()

    @property
    def has_bf16(self) -> bool:
        """Whether matrix products run in bf16: on NVIDIA's cards from Ampere on."""
        return self.compute_capability is None or self.compute_capability >= (8, 0)


def known_gpus() -> dict[str, GPU]:
    """Every GPU of the catalogue, by name."""
    return dict(_catalogue())


def find_gpu(name: str) -> GPU:
    """The GPU meant by `name`: `h200`, `RTX 4090` or `NVIDIA A100-SXM4-80GB` as torch prints it."""
    gpu = _by_spelling().get(_spelling(name))
    if gpu is None:
        advice = "`oomph gpus` lists them all"
        raise UnknownName("GPU", name, _catalogue(), advice)
    return gpu


def parse_gpus(text: str) -> dict[str, GPU]:
    """GPUs by name from the text of a catalogue file; `BadInput` names the entry that is wrong."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"the GPU catalogue is not TOML: {error}") from None
    if document.get("schema") != SCHEMA:
        raise BadInput(f"the GPU catalogue has schema {document.get('schema')!r}, not {SCHEMA}")
    return {name: _parse_gpu(name, entry) for name, entry in document.get("gpus", {}).items()}


def _parse_gpu(name: str, entry: dict[str, Any]) -> GPU:
    def refuse(what: str) -> BadInput:
        return BadInput(f"GPU {name!r} in the catalogue: {what}")

    try:
        gpu = GPU(
            name=name,
            vendor=entry["vendor"],
            architecture=entry["architecture"],
            compute_capability=_capability(entry.get("compute_capability")),
            sm_count=entry["sm_count"],
            memory=parse_bytes(entry["memory"]),
            memory_bandwidth=entry["memory_bandwidth"],
            host_link=entry["host_link"],
            rates=entry["rates"],
            aliases=tuple(entry.get("aliases", ())),
        )
    except KeyError as error:
        raise refuse(f"{error.args[0]} is missing") from None
    unknown = entry.keys() - GPU.__dataclass_fields__.keys()
    if unknown:
        raise refuse(f"{sorted(unknown)[0]} is not a field")
    if gpu.vendor not in VENDORS:
        raise refuse(f"vendor {gpu.vendor!r} is not one of {', '.join(VENDORS)}")
    if (gpu.compute_capability is not None) != (gpu.vendor == "nvidia"):
        raise refuse("compute_capability belongs to NVIDIA's cards, and to each of them")
    if not set(gpu.rates) <= set(RATE_DTYPES) or "fp32" not in gpu.rates:
        raise refuse(f"rates must give fp32 and otherwise name dtypes of {', '.join(RATE_DTYPES)}")
    for number in (gpu.sm_count, gpu.memory_bandwidth, gpu.host_link, *gpu.rates.values()):
        if not isinstance(number, int | float) or not math.isfinite(number) or number <= 0:
            raise refuse(f"{number!r} is not a positive number")
    return gpu


def _capability(pair: list[int] | None) -> tuple[int, int] | None:
    if pair is None:
        return None
    if len(pair) != 2:
        raise BadInput(f"a compute capability is a major and a minor number, not {pair}")
    return pair[0], pair[1]


@functools.cache
def _catalogue() -> dict[str, GPU]:
    text = resources.files("oomph.gpus").joinpath("catalogue.toml").read_text(encoding="utf-8")
    return parse_gpus(text)


@functools.cache
def _by_spelling() -> dict[str, GPU]:
    spellings: dict[str, GPU] = {}
    for gpu in _catalogue().values():
        for name in (gpu.name, *gpu.aliases):
            other = spellings.setdefault(_spelling(name), gpu)
            assert other is gpu, f"{name} is both {other.name} and {gpu.name}"
    return spellings


def _spelling(name: str) -> str:
    """`NVIDIA GeForce RTX 4090`, `rtx_4090` and `RTX4090` are one spelling."""
    words = re.sub(r"\b(nvidia|geforce|tesla|quadro|amd|instinct|radeon)\b", " ", name.lower())
    return re.sub(r"[^a-z0-9]", "", words)
