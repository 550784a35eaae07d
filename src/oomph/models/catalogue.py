"""Well-known model shapes by name, from catalogue.toml; neither torch nor transformers needed."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from oomph.errors import BadInput, UnknownName

SCHEMA = 1
KINDS = (
    "causal-lm",
    "masked-lm",
    "sequence-classification",
    "seq2seq-lm",
    "image-classification",
    "image-to-text",
    "speech-seq2seq",
    "audio-classification",
    "ctc",
)


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """One model of the catalogue: transformers' classes and the values that give it its shape."""

    name: str
    model_class: str
    """Name of the model class in transformers."""
    config_class: str
    """Name of the config class in transformers."""
    config: Mapping[str, Any] = field(hash=False)
    """Values that differ from the config class's defaults."""
    kind: str
    """What its training step computes: one of `KINDS`."""
    parameters: int
    """How many it has, as published; tied weights count once."""
    batch: int
    seq: int
    """Tokens; for images pixels of a side; for speech-seq2seq tokens of the transcript; for other
    audio samples."""
    aliases: tuple[str, ...] = ()


def known_models() -> dict[str, ModelEntry]:
    """Every model of the catalogue, by name."""
    return dict(_catalogue())


def find_model(name: str) -> ModelEntry:
    """The model meant by `name`: `llama-3.2-1b` or `meta-llama/Llama-3.2-1B` as the hub has it."""
    entry = _by_spelling().get(_spelling(name))
    if entry is None:
        advice = "`oomph models` lists them all; a path to a config.json works too"
        raise UnknownName("model", name.rsplit("/", 1)[-1], _catalogue(), advice)
    return entry


def parse_models(text: str) -> dict[str, ModelEntry]:
    """Models by name from the text of a catalogue file; `BadInput` names the wrong entry."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"the model catalogue is not TOML: {error}") from None
    if document.get("schema") != SCHEMA:
        raise BadInput(f"the model catalogue has schema {document.get('schema')!r}, not {SCHEMA}")
    return {name: _parse_model(name, entry) for name, entry in document.get("models", {}).items()}


def _parse_model(name: str, fields: dict[str, Any]) -> ModelEntry:
    try:
        entry = ModelEntry(**{**fields, "name": name, "aliases": tuple(fields.get("aliases", ()))})
    except TypeError as error:
        raise BadInput(f"model {name!r} in the catalogue: {error}") from None
    if entry.kind not in KINDS:
        raise BadInput(f"model {name!r} in the catalogue: kind {entry.kind!r} is unknown")
    for number in (entry.parameters, entry.batch, entry.seq):
        if not isinstance(number, int) or number < 1:
            raise BadInput(f"model {name!r} in the catalogue: {number!r} is not a positive count")
    return entry


@functools.cache
def _catalogue() -> dict[str, ModelEntry]:
    text = resources.files("oomph.models").joinpath("catalogue.toml").read_text(encoding="utf-8")
    return parse_models(text)


@functools.cache
def _by_spelling() -> dict[str, ModelEntry]:
    spellings: dict[str, ModelEntry] = {}
    for entry in _catalogue().values():
        for name in (entry.name, *entry.aliases):
            other = spellings.setdefault(_spelling(name), entry)
            assert other is entry, f"{name} is both {other.name} and {entry.name}"
    return spellings


def _spelling(name: str) -> str:
    """`meta-llama/Llama-3.2-1B` and `llama_3.2_1b` are one spelling; 1.1b and 11b are not."""
    return re.sub(r"[^a-z0-9.]", "", name.rsplit("/", 1)[-1].lower())
