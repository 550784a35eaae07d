"""A Profile: what was measured on one machine, kept as JSON in the user's config folder.

A file that was cut short, edited into something else or written by another oomph is refused in
words: measuring again takes a minute. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oomph.errors import BadInput, UnknownName
from oomph.gpus.catalogue import GPU, find_gpu

SCHEMA_VERSION = 1
KIND = "oomph gpu profile"
#: The dtypes a card is judged by, most telling first: the first that was measured and is rated.
JUDGED_BY = ("bf16", "fp16", "tf32", "fp32")
#: Products of at least this part of the largest one's operations count as large.
LARGE = 1 / 8
#: What a part of the data sheet's rate may be: a little more than all of it, and never nothing.
LEAST_EFFICIENCY, MOST_EFFICIENCY = 1e-3, 1.5


@dataclass(frozen=True, kw_only=True)
class Profile:
    """How fast one machine was found to be. What is None or absent was not measured.

    Rates are per second: of operations, bytes or parameters.
    """

    gpu: str
    """The catalogue's name, torch's where the catalogue has none, or `cpu`."""
    torch: str
    date: str
    """ISO 8601, UTC."""
    driver: str | None = None
    product_rates: Mapping[str, tuple[tuple[float, float], ...]] = field(
        default_factory=dict, hash=False
    )
    """Of matrix products by dtype: operations in one product, and operations per second."""
    attention_rates: Mapping[str, Mapping[str, float]] = field(default_factory=dict, hash=False)
    """Of causal attention by dtype: `forward` and `backward`; masked pairs do not count."""
    convolution_rates: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Of a 3×3 convolution's forward by dtype."""
    memory_bandwidth: float | None = None
    """Bytes read plus bytes written of a large copy inside the device's memory."""
    launch_seconds: float | None = None
    """Seconds of the CPU to launch one small eager kernel."""
    smallest_kernel_seconds: float | None = None
    """Seconds from the start of one smallest kernel to that of the next, both already queued."""
    host_to_device: float | None = None
    """Bytes, from pinned memory."""
    device_to_host: float | None = None
    """Bytes, to pinned memory."""
    both_ways: float | None = None
    """Bytes of both directions together while both are busy, pinned."""
    pageable: float | None = None
    """Bytes to the device from memory that is not pinned."""
    pinning: float | None = None
    """Bytes of pinned memory that can be made."""
    disk_write: float | None = None
    """Bytes."""
    disk_read: float | None = None
    """Bytes."""
    disk_method: str = ""
    """How the disk's rates were kept from being the page cache's, and in which folder."""
    host_adam: float | None = None
    """Parameters that torch's fused AdamW updates on the CPU, in fp32."""
    host_threads: int | None = None
    """Threads that `host_adam` was measured with."""

    def large_product_rate(self, dtype: str) -> float | None:
        """Operations per second of large products: the median of those near the largest."""
        rates = self.product_rates.get(dtype)
        if not rates:
            return None
        largest = max(flops for flops, _ in rates)
        return statistics.median(rate for flops, rate in rates if flops >= LARGE * largest)

    def efficiency(self, gpu: GPU) -> dict[str, float]:
        """The part of the data sheet's rates that large kernels reached, by kind of work.

        Kinds are those of `oomph.timing.work.Work`; one that was not measured is left out.
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
        """The profile that `as_dict` wrote; `BadInput` says what is wrong with another."""
        if values.get("kind") != KIND:
            raise BadInput(f"this is no GPU profile; {_AGAIN}")
        if values.get("schema_version") != SCHEMA_VERSION:
            raise BadInput(
                f"the GPU profile has schema {values.get('schema_version')!r}, and this oomph"
                f" reads {SCHEMA_VERSION}; {_AGAIN}"
            )
        given = {key: value for key, value in values.items() if key not in _ENVELOPE}
        odd = sorted(given.keys() ^ _READERS.keys())
        if odd:
            wrong = "has an unknown" if odd[0] in given else "lacks its"
            raise BadInput(f"the GPU profile {wrong} {odd[0]!r}; {_AGAIN}")
        read = {}
        for key, value in given.items():
            try:
                read[key] = _READERS[key](value)
            except (ValueError, OverflowError) as error:
                raise BadInput(f"the GPU profile's {key}: {error}; {_AGAIN}") from None
        return cls(**read)


def save_profile(profile: Profile) -> Path:
    """Write a profile where `load_profile` finds it; an old one is replaced only by a whole one."""
    path = profile_path(profile.gpu)
    text = json.dumps(profile.as_dict(), indent=2, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, text)
    except OSError as error:
        raise BadInput(
            f"cannot write the GPU profile {path}: {error.strerror}; XDG_CONFIG_HOME names another"
            " place for it"
        ) from None
    return path


def load_profile(name: str) -> Profile | None:
    """What was measured of a GPU on this machine, by any name of it; None where nothing was."""
    path = profile_path(name)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInput(f"cannot read the GPU profile {path}: {error.strerror}") from None
    except ValueError as error:
        raise BadInput(f"{path} is no GPU profile, or part of one: {error}; {_AGAIN}") from None
    try:
        profile = Profile.from_dict(values if isinstance(values, dict) else {})
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None
    if _file_name(profile.gpu) != path.name:
        raise BadInput(f"{path} is a profile of {profile.gpu}, not of {name}; {_AGAIN}")
    return profile


def profile_path(name: str) -> Path:
    """Where the profile of a GPU is kept, whatever spelling of its name is given."""
    config = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not config.is_absolute():  # unset, empty or against the XDG rules, which say to ignore it
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


def _replace(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8"
    ) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _part(rates: Mapping[str, float | None], gpu: GPU) -> float | None:
    """The part of the card's rate that was reached in the most telling dtype measured."""
    for dtype in JUDGED_BY:
        rate = rates.get(dtype)
        if rate is not None and dtype in gpu.rates:
            return rate / gpu.rates[dtype]
    return None


# --- Reading what may have been edited ------------------------------------------------------------

_ENVELOPE = ("kind", "schema_version")
_AGAIN = "`oomph gpus measure` writes it anew"


def _number(value: Any) -> float:
    fine = isinstance(value, int | float) and not isinstance(value, bool)
    if not fine or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{value!r} is not a positive number")
    return float(value)


def _number_or_none(value: Any) -> float | None:
    return None if value is None else _number(value)


def _count_or_none(value: Any) -> int | None:
    return None if value is None else round(_number(value))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value


def _text_or_none(value: Any) -> str | None:
    return None if value is None else _text(value)


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not a table by dtype")
    return value


def _by_size(value: Any) -> dict[str, tuple[tuple[float, float], ...]]:
    return {dtype: tuple(_pair(pair) for pair in _list(v)) for dtype, v in _table(value).items()}


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{value!r} is not a list")
    return list(value)


def _pair(value: Any) -> tuple[float, float]:
    pair = _list(value)
    if len(pair) != 2:
        raise ValueError(f"{value!r} is not operations and a rate")
    return _number(pair[0]), _number(pair[1])


def _by_direction(value: Any) -> dict[str, dict[str, float]]:
    return {dtype: _rates(rates) for dtype, rates in _table(value).items()}


def _rates(value: Any) -> dict[str, float]:
    return {name: _number(rate) for name, rate in _table(value).items()}


_READERS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(Profile.__dataclass_fields__, _number_or_none),
    "gpu": _text,
    "driver": _text_or_none,
    "torch": _text,
    "date": _text,
    "disk_method": _text,
    "product_rates": _by_size,
    "attention_rates": _by_direction,
    "convolution_rates": _rates,
    "host_threads": _count_or_none,
}
