"""GPUs by name, from catalogue.toml: memory, bandwidths and rates; needs no GPU and no torch."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from oomph.errors import BadInput, UnknownName
from oomph.files.catalogues import by_spelling, parse_catalogue
from oomph.files.schema import Count, Mismatch, Positive, PositiveCount, read_as
from oomph.quoting import brief
from oomph.units import parse_bytes

SCHEMA = 1
VENDORS = ("nvidia", "amd")
RATE_DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")


@dataclass(frozen=True, kw_only=True)
class GPU:
    """One GPU: its memory and its speed."""

    name: str
    vendor: str
    """`nvidia` or `amd`."""
    architecture: str
    compute_capability: tuple[Count, Count] | None
    """CUDA's compute capability; None on AMD."""
    sm_count: PositiveCount
    """Streaming multiprocessors, or compute units on AMD."""
    memory: PositiveCount
    """Total bytes visible to a process, as the driver reports: less than the advertised size."""
    memory_bandwidth: Positive
    """Bytes per second, theoretical."""
    host_link: Positive
    """Bytes per second in each direction between host and GPU, theoretical."""
    rates: Mapping[str, Positive] = field(hash=False)
    """Dense flop/s of a matrix product by dtype (`RATE_DTYPES`); absent if unsupported."""
    aliases: tuple[str, ...] = ()

    @property
    def has_bf16(self) -> bool:
        """Whether it has bf16 matrix products: on NVIDIA, from Ampere on."""
        return self.compute_capability is None or self.compute_capability >= (8, 0)


def known_gpus() -> dict[str, GPU]:
    """Every GPU of the catalogue, by name."""
    return dict(_catalogue())


def find_gpu(name: str) -> GPU:
    """The GPU called `name`: `h200`, `RTX 4090`, or `NVIDIA A100-SXM4-80GB` as torch prints it."""
    gpu = _by_spelling().get(_spelling(name))
    if gpu is None:
        advice = "`oomph gpus` lists them all"
        raise UnknownName("GPU", name, _catalogue(), advice)
    return gpu


def parse_gpus(text: str) -> dict[str, GPU]:
    """Parse the text of a catalogue file to GPUs by name; `BadInput` names a wrong entry."""
    return parse_catalogue(text, kind="GPU", tables="gpus", schema=SCHEMA, parse=_parse_gpu)


def _parse_gpu(name: str, entry: Any) -> GPU:
    def refuse(what: str) -> BadInput:
        return BadInput(f"GPU {name!r} in the catalogue: {what}")

    if not isinstance(entry, dict):
        raise refuse(f"it is a table, not {brief(entry)}")
    values = {**entry, "name": name}
    if isinstance(values.get("memory"), str):
        try:
            values["memory"] = parse_bytes(values["memory"])
        except BadInput as error:
            raise refuse(f"its memory: {error}") from None
    try:
        gpu = read_as(GPU, {"compute_capability": None, **values})
    except Mismatch as problem:
        raise refuse(str(problem)) from None
    if gpu.vendor not in VENDORS:
        raise refuse(f"vendor {gpu.vendor!r} is not one of {', '.join(VENDORS)}")
    if (gpu.compute_capability is not None) != (gpu.vendor == "nvidia"):
        raise refuse("compute_capability belongs to NVIDIA's cards, and to each of them")
    if not set(gpu.rates) <= set(RATE_DTYPES) or "fp32" not in gpu.rates:
        raise refuse(f"rates must give fp32 and otherwise name dtypes of {', '.join(RATE_DTYPES)}")
    return gpu


@functools.cache
def _catalogue() -> dict[str, GPU]:
    text = resources.files("oomph.hardware").joinpath("catalogue.toml").read_text(encoding="utf-8")
    return parse_gpus(text)


@functools.cache
def _by_spelling() -> dict[str, GPU]:
    return by_spelling(_catalogue().values(), _spelling)


def _spelling(name: str) -> str:
    """Normalize a name: `NVIDIA GeForce RTX 4090`, `rtx_4090` and `RTX4090` match."""
    words = re.sub(r"\b(nvidia|geforce|tesla|quadro|amd|instinct|radeon)\b", " ", name.lower())
    return re.sub(r"[^a-z0-9]", "", words)
