"""How a file is damaged: its bytes, or the values that it stands for. All of it by a seed."""

from __future__ import annotations

import copy
import io
import json
import pickle
import pickletools
import random
from collections.abc import Callable
from typing import Any

#: JSON that Python's own writer would not write, by the word that stands for it meanwhile.
RAW = {
    "@@deep list@@": "[" * 5_000 + "]" * 5_000,
    "@@open lists@@": "[" * 50_000,
    "@@deep object@@": '{"a":' * 3_000 + "1" + "}" * 3_000,
    "@@ninety levels@@": "[" * 90 + "]" * 90,
    "@@digits@@": "9" * 5_000,
    "@@many digits@@": "-" + "7" * 400,
    "@@exponent@@": "1e999",
    "@@twice@@": '{"a": 1, "a": 2}',
    "@@many@@": "[" + "0," * 20_000 + "0]",
    "@@cut@@": "",
}

#: What somebody may have written in the place of anything.
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 255, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**30,
    0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf"),
    "", "x", "NaN", "nan", "1e999", "-1", "0", "9" * 5_000, "\x1b[2J\x07", "\ud800", "\u202e", "\0",
    "a" * 20_000, "../../etc/passwd", "/dev/zero", "$float", "keep", "recompute", "fp32", "😀",
    [], {}, [[]], {"": {}}, [None], [0] * 100, {"a": 1}, {"$tensor": "x"}, {"$float": "nan"},
    {"$items": [[[], 1]]}, {"$items": 3}, {"$bytes": "?"}, {"$tuple": 1},
    {"$counter": [["a", "b"]]},
    *RAW,
)  # fmt: skip

_TOKENS = (
    b"NaN", b"Infinity", b"1e999", b"-1", b"9" * 400, b"null", b"[", b"]", b"{", b"}", b'"', b",",
    b":", b"\\", b"\\ud800", b"\x00", b"\xff", b"\xef\xbb\xbf", b"[" * 3_000, b'{"a":' * 2_000,
    b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80", b"(", b")", b"\x85" * 2_000, b"]" * 2_000, b"\x86",
    b"h\x00h\x00\x86\x94", b"e", b"u", b"s", b"a", b"\x94", b"h\x00", b"j\xff\x00\x00\x00", b".",
    b"[a.b.c]\n", b"a.b = 1\n", b'"""', b"= [\n",
)  # fmt: skip


def damage_bytes(data: bytes, rng: random.Random, times: int | None = None) -> bytes:
    """The same bytes with a few changes: flipped, cut, doubled, moved, or replaced by tokens."""
    found = bytearray(data)
    for _ in range(times or rng.choice((1, 1, 2, 3, 8))):
        if not found:
            break
        at = rng.randrange(len(found))
        end = min(at + int(rng.expovariate(1 / 12)) + 1, len(found))
        match rng.randrange(8):
            case 0:
                found[at] ^= 1 << rng.randrange(8)
            case 1:
                found[at] = rng.randrange(256)
            case 2:
                del found[at:end]
            case 3:
                found[at:at] = found[at:end] * rng.choice((1, 2, 50))
            case 4:
                found[at:at] = rng.choice(_TOKENS)
            case 5:
                found[at:end] = rng.choice(_TOKENS)
            case 6:
                piece = bytes(found[at:end])
                del found[at:end]
                to = rng.randrange(len(found) + 1)
                found[to:to] = piece
            case _:
                del found[rng.choice((at, len(found) - end + at)) :]
    return bytes(found)


def damage_value(value: Any, rng: random.Random, times: int | None = None) -> Any:
    """A copy of a plain value with a few of its parts swapped, lost, renamed, grown or replaced."""
    root = [copy.deepcopy(value)]
    for _ in range(times or rng.choice((1, 1, 1, 2, 4))):
        parent, key = _somewhere(root, rng)
        _change(root, parent, key, rng)
    return root[0]


def _somewhere(root: list[Any], rng: random.Random) -> tuple[Any, Any]:
    """A part, as what it is in and where there; the value as a whole seldom."""
    parent: Any = root
    key: Any = 0
    while True:
        inner = parent[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.15:
            if parent is root and inner and isinstance(inner, dict | list) and rng.random() < 0.9:
                continue
            return parent, key
        parent = inner
        key = rng.choice(list(inner)) if isinstance(inner, dict) else rng.randrange(len(inner))


def _change(root: list[Any], parent: Any, key: Any, rng: random.Random) -> None:
    old = parent[key]
    match rng.randrange(9):
        case 0 | 1 | 2:
            parent[key] = copy.deepcopy(rng.choice(ODD))
        case 3 if parent is not root:
            del parent[key]
        case 4 if isinstance(parent, dict):
            del parent[key]
            odd = rng.choice(ODD)
            name = odd if isinstance(odd, str) else f"{key}x"
            parent[name] = old
        case 5:
            parent[key] = rng.choice(([old], {"a": old}, [old] * 3, [old, old, None]))
        case 6 if isinstance(old, dict | list) and old:
            parent[key] = next(iter(old.values() if isinstance(old, dict) else old))
        case 7 if isinstance(old, int | float):
            parent[key] = _other_number(old, rng)
        case _:
            there, other = _somewhere(root, rng)
            parent[key] = copy.deepcopy(there[other])


def _other_number(old: float, rng: random.Random) -> Any:
    changes: tuple[Callable[[Any], Any], ...] = (
        lambda n: -n,
        lambda n: n + 1,
        lambda n: n - 1,
        lambda n: n * 10**6,
        lambda n: n / 3,
        lambda n: n * 10**25,
        str,
        float,
    )
    return rng.choice(changes)(old)


def to_json(value: Any) -> bytes:
    """JSON with what Python's writer leaves out: nesting without end, numbers no float can hold."""
    text = json.dumps(value)
    for word, raw in RAW.items():
        if word in text:
            text = text[: text.index(word)] if word == "@@cut@@" else text.replace(f'"{word}"', raw)
    return text.encode()


def damage_pickle(value: Any, rng: random.Random) -> bytes:
    """A pickle of a value, or of a damaged one, with its opcodes mixed up as well."""
    if rng.random() < 0.5:
        value = damage_value(value, rng)
    data = pickle.dumps(value, rng.choice((2, 3, 4, 5)))
    match rng.randrange(4):
        case 0:
            return data
        case 1:
            return damage_bytes(data, rng)
        case _:
            return _mix_opcodes(data, rng)


def _mix_opcodes(data: bytes, rng: random.Random) -> bytes:
    places = [place for _, _, place in pickletools.genops(io.BytesIO(data)) if place is not None]
    ends = [*places[1:], len(data)]
    ops = [data[start:stop] for start, stop in zip(places, ends, strict=True)]
    for _ in range(rng.choice((1, 2, 5))):
        at = rng.randrange(len(ops))
        match rng.randrange(5):
            case 0:
                del ops[at]
            case 1:
                ops.insert(at, rng.choice(ops))
            case 2:
                ops[at] = rng.choice(ops)
            case 3:
                ops.insert(at, rng.choice(_TOKENS))
            case _:
                other = rng.randrange(len(ops))
                ops[at], ops[other] = ops[other], ops[at]
        if not ops:
            break
    return b"".join(ops)
