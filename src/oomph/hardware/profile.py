"""A Profile: measurements of one machine, kept as JSON in the user's config folder.

A file that is truncated, edited into something else or written by another oomph version is refused
with an error message: measuring again takes a minute. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oomph.errors import BadInput, UnknownName
from oomph.files.plain_json import BadJson, parse_json
from oomph.files.reading import read_regular
from oomph.files.schema import Mismatch, Positive, PositiveCount, read_as
from oomph.files.writing import make_folder, replace_whole
from oomph.hardware.catalogue import GPU, find_gpu
from oomph.quoting import brief

SCHEMA_VERSION = 1
_MOST_BYTES = 1 << 20
KIND = "oomph gpu profile"
#: Dtypes to judge a GPU by, most telling first; the first that was measured and is rated counts.
JUDGED_BY = ("bf16", "fp16", "tf32", "fp32")
#: Products with at least this share of the largest one's operations count as large.
LARGE = 1 / 8
#: Limits on the share of the data sheet's rate: never zero, at most a little more than all of it.
LEAST_EFFICIENCY, MOST_EFFICIENCY = 1e-3, 1.5


@dataclass(frozen=True, kw_only=True)
class Profile:
    """How fast one machine was measured to be. What is None or absent was not measured.

    Rates are per second: of operations, bytes or parameters.
    """

    gpu: str
    """The catalogue's name, torch's if the catalogue has none, or `cpu`."""
    torch: str
    date: str
    """ISO 8601, UTC."""
    driver: str | None = None
    product_rates: Mapping[str, tuple[tuple[Positive, Positive], ...]] = field(
        default_factory=dict, hash=False
    )
    """Matrix products by dtype: operations in one product, and operations per second."""
    attention_rates: Mapping[str, Mapping[str, Positive]] = field(default_factory=dict, hash=False)
    """Causal attention by dtype: `forward` and `backward`; masked pairs do not count."""
    convolution_rates: Mapping[str, Positive] = field(default_factory=dict, hash=False)
    """A 3×3 convolution's forward by dtype."""
    memory_bandwidth: Positive | None = None
    """Bytes read plus bytes written by a large copy in the device's memory."""
    launch_seconds: Positive | None = None
    """CPU seconds to launch one small eager kernel."""
    smallest_kernel_seconds: Positive | None = None
    """Seconds from the start of a minimal kernel to the start of the next, both already queued."""
    host_to_device: Positive | None = None
    """Bytes, from pinned memory."""
    device_to_host: Positive | None = None
    """Bytes, to pinned memory."""
    both_ways: Positive | None = None
    """Bytes in both directions together while both are busy, pinned."""
    pageable: Positive | None = None
    """Bytes to the device from pageable memory."""
    pinning: Positive | None = None
    """Bytes of pinned memory allocated."""
    disk_write: Positive | None = None
    """Bytes."""
    disk_read: Positive | None = None
    """Bytes."""
    disk_method: str = ""
    """How the page cache was kept from affecting the disk's rates, and in which folder."""
    host_adam: Positive | None = None
    """Parameters that torch's fused AdamW updates on the CPU, in fp32."""
    host_threads: PositiveCount | None = None
    """Threads that `host_adam` was measured with."""

    def large_product_rate(self, dtype: str) -> float | None:
        """Operations per second of large products: the median of those near the largest."""
        rates = self.product_rates.get(dtype)
        if not rates:
            return None
        largest = max(flops for flops, _ in rates)
        return statistics.median(rate for flops, rate in rates if flops >= LARGE * largest)

    def efficiency(self, gpu: GPU) -> dict[str, float]:
        """The share of the data sheet's rates that large kernels reached, by kind of work.

        Kinds are those of `oomph.hardware.timing.work.Work`; those not measured are left out.
        """
        products = {dtype: self.large_product_rate(dtype) for dtype in self.product_rates}
        forward = {d: rates.get("forward") for d, rates in self.attention_rates.items()}
        backward = {d: rates.get("backward") for d, rates in self.attention_rates.items()}
        parts = {
            "product": _part(products, gpu),
            "convolution": _part(self.convolution_rates, gpu),
            "attention": _part(forward, gpu),
            "attention backward": _part(backward, gpu),
        }
        if self.memory_bandwidth is not None:
            parts["elementwise"] = self.memory_bandwidth / gpu.memory_bandwidth
        return {
            kind: min(max(part, LEAST_EFFICIENCY), MOST_EFFICIENCY)
            for kind, part in parts.items()
            if part is not None
        }

    def as_dict(self) -> dict[str, Any]:
        """The profile as plain JSON; these keys stay."""
        return {"kind": KIND, "schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Profile:
        """Read what `as_dict` wrote; `BadInput` says what is wrong with anything else."""
        if values.get("kind") != KIND:
            raise BadInput(f"this is no GPU profile; {_AGAIN}")
        if values.get("schema_version") != SCHEMA_VERSION:
            raise BadInput(
                f"the GPU profile has schema {brief(values.get('schema_version'))}, and this oomph"
                f" reads {SCHEMA_VERSION}; {_AGAIN}"
            )
        given = {key: value for key, value in values.items() if key not in _ENVELOPE}
        odd = sorted(given.keys() ^ cls.__dataclass_fields__.keys())
        if odd:
            wrong = "has an unknown" if odd[0] in given else "lacks its"
            raise BadInput(f"the GPU profile {wrong} {brief(odd[0])}; {_AGAIN}")
        try:
            return read_as(cls, given)
        except Mismatch as problem:
            raise BadInput(f"the GPU profile's {problem.place[0]}: {problem}; {_AGAIN}") from None


def save_profile(profile: Profile) -> Path:
    """Write a profile where `load_profile` finds it, replacing an old one atomically."""
    path = profile_path(profile.gpu)
    text = json.dumps(profile.as_dict(), indent=2, allow_nan=False) + "\n"
    try:
        make_folder(path.parent)
        replace_whole(path, text.encode(), sync=True)
    except OSError as error:
        raise BadInput(
            f"cannot write the GPU profile {path}: {error.strerror}; XDG_CONFIG_HOME names another"
            " place for it"
        ) from None
    return path


def load_profile(name: str) -> Profile | None:
    """The measurements of a GPU on this machine, by any of its names; None if there are none."""
    path = profile_path(name)
    try:
        values = parse_json(read_regular(path, most=_MOST_BYTES), any_number=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInput(f"cannot read the GPU profile {path}: {error.strerror}") from None
    except BadJson as error:
        raise BadInput(f"{path} is no GPU profile, or part of one: {error}; {_AGAIN}") from None
    try:
        profile = Profile.from_dict(values if isinstance(values, dict) else {})
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None
    if _file_name(profile.gpu) != path.name:
        raise BadInput(f"{path} is a profile of {profile.gpu}, not of {name}; {_AGAIN}")
    return profile


def profile_path(name: str) -> Path:
    """The path of a GPU's profile, for any spelling of its name."""
    config = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not config.is_absolute():  # unset, empty or relative, which the XDG rules say to ignore
        config = Path("~/.config").expanduser()
    return config / "oomph" / "gpus" / _file_name(name)


def _file_name(name: str) -> str:
    try:
        known = find_gpu(name).name
    except UnknownName:
        known = name
    stem = re.sub(r"[^a-z0-9]+", "-", known.lower()).strip("-")
    if not stem:
        raise BadInput(f"{name!r} is no name of a GPU; `oomph gpus` lists those that are known")
    return f"{stem}.json"


def _part(rates: Mapping[str, float | None], gpu: GPU) -> float | None:
    """The share of the GPU's rate that was reached in the most telling dtype measured."""
    for dtype in JUDGED_BY:
        rate = rates.get(dtype)
        if rate is not None and dtype in gpu.rates:
            return rate / gpu.rates[dtype]
    return None


_ENVELOPE = ("kind", "schema_version")
_AGAIN = "`oomph gpus measure` writes it anew"
