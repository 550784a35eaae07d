"""Well-known model shapes by name, from catalogue.toml; needs neither torch nor transformers."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from oomph.errors import BadInput, UnknownName
from oomph.files.catalogues import by_spelling, parse_catalogue
from oomph.files.schema import Mismatch, PositiveCount, read_as
from oomph.quoting import brief

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
    """One model of the catalogue: transformers' classes and the config values of its shape."""

    name: str
    model_class: str
    """Name of the model class in transformers."""
    config_class: str
    """Name of the config class in transformers."""
    config: Mapping[str, Any] = field(hash=False)
    """Values that differ from the config class's defaults."""
    kind: str
    """What its training step computes: one of `KINDS`."""
    parameters: PositiveCount
    """Number of parameters, as published; tied weights count once."""
    batch: PositiveCount
    seq: PositiveCount
    """Tokens; for images pixels per side; for speech-seq2seq tokens of the transcript; for other
    audio samples."""
    aliases: tuple[str, ...] = ()


def known_models() -> dict[str, ModelEntry]:
    """Every model of the catalogue, by name."""
    return dict(_catalogue())


def find_model(name: str) -> ModelEntry:
    """The model called `name`: `llama-3.2-1b`, or `meta-llama/Llama-3.2-1B` as on the hub."""
    entry = _by_spelling().get(_spelling(name))
    if entry is None:
        advice = "`oomph models` lists them all; a path to a config.json works too"
        raise UnknownName("model", name.rsplit("/", 1)[-1], _catalogue(), advice)
    return entry


def parse_models(text: str) -> dict[str, ModelEntry]:
    """Parse the text of a catalogue file to models by name; `BadInput` names a wrong entry."""
    return parse_catalogue(text, kind="model", tables="models", schema=SCHEMA, parse=_parse_model)


def _parse_model(name: str, fields: Any) -> ModelEntry:
    if not isinstance(fields, dict):
        raise BadInput(f"model {name!r} in the catalogue is a table, not {brief(fields)}")
    try:
        entry = read_as(ModelEntry, {**fields, "name": name})
    except Mismatch as problem:
        raise BadInput(f"model {name!r} in the catalogue: {problem}") from None
    if entry.kind not in KINDS:
        raise BadInput(f"model {name!r} in the catalogue: kind {entry.kind!r} is unknown")
    return entry


@functools.cache
def _catalogue() -> dict[str, ModelEntry]:
    text = (
        resources.files("oomph.jobs.models").joinpath("catalogue.toml").read_text(encoding="utf-8")
    )
    return parse_models(text)


@functools.cache
def _by_spelling() -> dict[str, ModelEntry]:
    return by_spelling(_catalogue().values(), _spelling)


def _spelling(name: str) -> str:
    """Normalize a name: `meta-llama/Llama-3.2-1B` and `llama_3.2_1b` match; 1.1b and 11b do not."""
    return re.sub(r"[^a-z0-9.]", "", name.rsplit("/", 1)[-1].lower())
