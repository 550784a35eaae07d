"""The device-memory options of `PYTORCH_CUDA_ALLOC_CONF`, parsed as torch 2.13 parses them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from oomph.errors import BadInput
from oomph.units import MIB

POWER2_INTERVALS = 16
LEAST_MAX_SPLIT = 20 * MIB

# These options concern host memory and locking: they cannot change what is reserved on the device.
_NO_EFFECT = frozenset(
    {
        "pinned_free_catch_all",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "release_lock_on_cudamalloc",
    }
)


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """The options of the caching allocator that decide where a block goes."""

    expandable_segments: bool = False
    """Grow one segment per pool and stream page by page, instead of one segment per request."""

    max_split_size: int | None = None
    """Blocks of at least this many bytes are never split. None: any block may be split."""

    roundup_power2_divisions: tuple[int, ...] = (0,) * POWER2_INTERVALS
    """Steps between two powers of two that sizes are rounded up to; 0 or 1: round to 512 B only.
    One entry per power of two from 1 MiB to 32 GiB; smaller and larger sizes use the nearest entry.
   """

    garbage_collection_threshold: float = 0.0
    """Fraction of the cap above which blocks long unused are released early. 0: never."""

    def __post_init__(self) -> None:
        split = self.max_split_size
        if split is not None and (split < LEAST_MAX_SPLIT or split % MIB):
            raise BadInput(
                f"max_split_size must be whole MiB and at least 20 MiB, not {split} bytes"
            )
        divisions = self.roundup_power2_divisions
        # n & (n - 1) is 0 for 0 and for powers of two.
        if len(divisions) != POWER2_INTERVALS or any(n < 0 or n & (n - 1) for n in divisions):
            raise BadInput(
                f"roundup_power2_divisions needs {POWER2_INTERVALS} entries, each 0 or a power of "
                f"two, not {divisions}"
            )
        if not 0.0 <= self.garbage_collection_threshold < 1.0:
            raise BadInput(
                "garbage_collection_threshold must be between 0 and 1, not "
                f"{self.garbage_collection_threshold}"
            )

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Read `"expandable_segments:True,max_split_size_mb:128"`."""
        expandable, max_split, threshold = False, None, 0.0
        divisions = (0,) * POWER2_INTERVALS
        for name, value in _options(text):
            if name == "expandable_segments":
                expandable = _switch(name, value)
            elif name == "max_split_size_mb":
                max_split = _whole(name, value) * MIB
            elif name == "roundup_power2_divisions":
                divisions = _divisions(value)
            elif name == "garbage_collection_threshold":
                threshold = _fraction(name, value)
            elif name == "backend":
                if value != "native":
                    raise BadInput(f"backend:{value} is another allocator; only native is replayed")
            elif name not in _NO_EFFECT:
                raise BadInput(
                    f"allocator option {name!r} is unknown or not replayed; leave it out of "
                    "PYTORCH_CUDA_ALLOC_CONF"
                )
        return cls(
            expandable_segments=expandable,
            max_split_size=max_split,
            roundup_power2_divisions=divisions,
            garbage_collection_threshold=threshold,
        )

    def as_text(self) -> str:
        """The shortest text that torch and `parse` read back as these settings."""
        parts = []
        if self.expandable_segments:
            parts.append("expandable_segments:True")
        if self.max_split_size is not None:
            parts.append(f"max_split_size_mb:{self.max_split_size // MIB}")
        divisions = self.roundup_power2_divisions
        if len(set(divisions)) > 1:
            # Every interval is named: the meaning of ">" has changed between torch versions.
            steps = ",".join(f"{1 << i}:{n}" for i, n in enumerate(divisions))
            parts.append(f"roundup_power2_divisions:[{steps}]")
        elif divisions[0]:
            parts.append(f"roundup_power2_divisions:{divisions[0]}")
        if self.garbage_collection_threshold:
            parts.append(f"garbage_collection_threshold:{self.garbage_collection_threshold}")
        return ",".join(parts)


DEFAULT_SETTINGS = AllocatorSettings()


def _options(text: str) -> list[tuple[str, str]]:
    bare = re.sub(r"\s", "", text)
    if not bare:
        return []
    options = []
    # A comma inside brackets belongs to the list.
    for part in re.split(r",(?![^\[]*\])", bare):
        match = re.fullmatch(r"(\w+):([^,:\[\]]+|\[[^\[\]]*\])", part)
        if match is None:
            raise BadInput(f"cannot read {part!r} in {text!r}; write options as name:value,…")
        options.append((match[1], match[2]))
    return options


def _switch(name: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise BadInput(f"{name} must be True or False, not {value!r}")
    return value == "True"


def _whole(name: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]+", value):
        raise BadInput(f"{name} must be a whole number, not {value!r}")
    return int(value)


def _fraction(name: str, value: str) -> float:
    try:
        fraction = float(value)
    except ValueError:
        fraction = 0.0
    if not 0.0 < fraction < 1.0:
        raise BadInput(f"{name} must be a number between 0 and 1, not {value!r}")
    return fraction


def _divisions(value: str) -> tuple[int, ...]:
    name = "roundup_power2_divisions"
    if not value.startswith("["):
        steps = _whole(name, value)
        if steps == 0:
            raise BadInput(f"{name} must be a power of two; to round to 512 B only, leave it out")
        return (steps,) * POWER2_INTERVALS
    divisions = [0] * POWER2_INTERVALS
    last: int | None = None
    for entry in value[1:-1].split(","):
        bound, colon, steps_text = entry.partition(":")
        if not colon:
            raise BadInput(f"cannot read {entry!r} in {name}; write it like [64:8,256:4,>:1]")
        steps = _whole(name, steps_text)
        if bound == ">":
            # Applies from the interval after the last named one; older torch began at that one
            # itself.
            start = (last or 0) + 1
            divisions[start:] = [steps] * (POWER2_INTERVALS - start)
            continue
        megabytes = _whole(name, bound)
        if megabytes == 0 or megabytes & (megabytes - 1):
            raise BadInput(f"the bounds in {name} are powers of two in MiB, not {bound!r}")
        interval = min(megabytes.bit_length() - 1, POWER2_INTERVALS - 1)
        if last is None:
            divisions[:interval] = [steps] * interval
        divisions[interval] = steps
        last = interval
    return tuple(divisions)
