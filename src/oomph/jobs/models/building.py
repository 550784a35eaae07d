"""Builds models with transformers' own classes, from the catalogue or from a config.json.

Nothing here accesses the network or runs code that came with a model, whatever a config names.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from oomph.errors import BadInput, MissingExtra, OomphError
from oomph.files.plain_json import BadJson, parse_json
from oomph.files.reading import read_regular
from oomph.jobs.models.catalogue import ModelEntry
from oomph.jobs.models.foreign_config import without_reach
from oomph.jobs.models.offline import offline
from oomph.jobs.models.size_limits import check_sizes

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Largest config.json; one with a hundred thousand labels has a tenth of that.
_MOST_CONFIG = 64 << 20

# Head to train a model type with if its config names no class: first match wins. Encoders come
# before decoders because most of them are listed as decoders too.
_HEADS = (
    "SPEECH_SEQ_2_SEQ",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "CAUSAL_LM",
    "IMAGE_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
    "CTC",
)


def build_config(entry: ModelEntry) -> Any:
    """The transformers config of a catalogue entry."""
    return _for_training(getattr(_transformers(), entry.config_class)(**entry.config))


def build_model(entry_or_config: ModelEntry | Any, *, initialise: bool = False) -> nn.Module:
    """A model in training mode, in torch's default dtype on its default device.

    Without `initialise` the weights are uninitialised memory, but tied weights are still tied.
    Under a fake tensor mode there are no values, so nothing is initialised.
    """
    if isinstance(entry_or_config, ModelEntry):
        config = build_config(entry_or_config)
        cls = getattr(_transformers(), entry_or_config.model_class)
    else:
        config, cls = entry_or_config, model_class(entry_or_config)
    _unscript(sys.modules[cls.__module__])
    try:
        with offline():
            return _build(cls, config, initialise=initialise)
    except OomphError:
        raise
    except Exception as error:  # each class fails on wrong values in its own way
        said = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else error
        raise BadInput(f"cannot build {cls.__name__} from this config: {said}") from error


def model_from_config_path(path: str | Path) -> tuple[type[nn.Module], Any]:
    """The model class and config for a Hugging Face config.json, or its folder."""
    transformers = _transformers()
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    values = _read_json(file)
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise BadInput(f"{file} has no model_type, so it is not the config of a known model")
    if model_type not in transformers.CONFIG_MAPPING:
        near = _nearest(model_type, transformers.CONFIG_MAPPING.keys())
        raise BadInput(f"{file}: transformers has no model type {model_type!r}{near}")
    check_sizes(values, file)
    values = without_reach(values, file)
    try:
        with offline():
            config = transformers.CONFIG_MAPPING[model_type].from_dict(values)
    except OomphError:
        raise
    except Exception as error:  # each config class checks its values in its own way
        raise BadInput(f"{file} is not a {model_type} config: {error}") from error
    return model_class(config), _for_training(config)


def model_class(config: Any) -> type[nn.Module]:
    """The class named under `architectures` in the config, or else the usual one of its type."""
    transformers = _transformers()
    usual = _usual_classes(config.model_type)
    named = config.architectures
    names = named if named and isinstance(named, list) else usual[:1]
    if not names:
        raise BadInput(
            f"model type {config.model_type!r} has no head oomph can train;"
            " name a class under architectures in its config"
        )
    cls: Any = None
    with contextlib.suppress(ImportError), offline():  # its package may be missing
        cls = getattr(transformers, str(names[0]), None)
    is_model = inspect.isclass(cls) and issubclass(cls, transformers.PreTrainedModel)
    if not is_model or cls.config_class is not type(config):
        near = _nearest(str(names[0]), usual)
        raise BadInput(f"transformers has no {config.model_type} model {names[0]!r}{near}")
    found: type[nn.Module] = cls
    return found


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingExtra("transformers", "hf") from None
    return transformers


def _for_training(config: Any) -> Any:
    # As transformers' Trainer does: a training step does not need a cache of keys and values.
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return config


def _build(cls: Any, config: Any, *, initialise: bool) -> nn.Module:
    import torch

    from oomph.torch_compat.dispatch import disable_current_modes
    from oomph.torch_compat.fake_tensors import detect_fake_mode

    if detect_fake_mode() is not None:
        # Some constructors read values that they derive from the config (a ramp of drop rates):
        # outside the modes those are real, and only the model's own tensors are made fake.
        with disable_current_modes(), torch.device("meta"):
            model = _build_uninitialised(cls, config)
        _remake_tensors(model)
        return model
    return cls(config) if initialise else _build_uninitialised(cls, config)


def _build_uninitialised(cls: Any, config: Any) -> nn.Module:
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = cls(config)
    # no_init_weights skips tying as well.
    model.tie_weights()
    built: nn.Module = model
    return built


def _remake_tensors(model: nn.Module) -> None:
    """Replace every tensor of the model by a new one under the modes now active."""
    import torch

    from oomph.torch_compat.modules import buffers_of, parameters_of

    new: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (
            parameters_of(module),
            buffers_of(module),
            vars(module),
        )
        for held in tables:
            for name, old in held.items():
                if isinstance(old, torch.Tensor):
                    if old not in new:
                        new[old] = _empty_as(old)
                    held[name] = new[old]


def _empty_as(old: torch.Tensor) -> torch.Tensor:
    import torch

    empty = torch.empty(old.shape, dtype=old.dtype, device="cpu")
    if isinstance(old, torch.nn.Parameter):
        return torch.nn.Parameter(empty, requires_grad=old.requires_grad)
    return empty


def _unscript(module: ModuleType) -> None:
    """Restore the Python functions of a model file that uses TorchScript (DeBERTa's does).

    Fake tensors cannot enter the TorchScript interpreter, and what is rehearsed must be what is run
    (rule 1).
    """
    import torch

    from oomph.torch_compat.compiler import SCRIPTED

    for name, value in list(vars(module).items()):
        if isinstance(value, torch.jit.ScriptFunction):
            setattr(module, name, getattr(value, SCRIPTED))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        # Like transformers: its configs may contain Infinity, and the last of duplicate keys wins.
        content = read_regular(file, most=_MOST_CONFIG)
        values = parse_json(content, any_number=True, unique_keys=False)
    except FileNotFoundError:
        raise BadInput(f"there is no {file}") from None
    except OSError as error:
        raise BadInput(f"cannot read {str(file)!r}: {error.strerror}") from None
    except BadJson as error:
        raise BadInput(f"{file} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise BadInput(f"{file} is not a config: it holds a {type(values).__name__}, not an object")
    return values


def _usual_classes(model_type: str) -> list[str]:
    from transformers.models.auto import modeling_auto

    classes = []
    for head in _HEADS:
        name = getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES").get(model_type)
        if isinstance(name, str):
            classes.append(name)
    return classes


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ""
