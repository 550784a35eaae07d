"""Building models with transformers' own classes, from the catalogue or from a config.json.

Nothing here reaches the network or runs code that came with a model.
"""

from __future__ import annotations

import difflib
import inspect
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from oomph.errors import BadInput, MissingExtra
from oomph.models.catalogue import ModelEntry

if TYPE_CHECKING:
    import torch
    from torch import nn

# Which head a model type is trained with when its config names no class: first match wins.
# Encoders come before decoders because most of them are listed as decoders too.
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

    Without `initialise` the weights hold whatever memory held; tied weights are tied all the same.
    Under a fake tensor mode there are no values, so nothing is initialised.
    """
    if isinstance(entry_or_config, ModelEntry):
        config = build_config(entry_or_config)
        cls = getattr(_transformers(), entry_or_config.model_class)
    else:
        config, cls = entry_or_config, model_class(entry_or_config)
    _unscript(sys.modules[cls.__module__])
    try:
        return _build(cls, config, initialise=initialise)
    except (ValueError, TypeError, ZeroDivisionError, RuntimeError) as error:
        raise BadInput(f"cannot build {cls.__name__} from this config: {error}") from error


def model_from_config_path(path: str | Path) -> tuple[type[nn.Module], Any]:
    """The model class and config that a Hugging Face config.json, or the folder it is in, means."""
    transformers = _transformers()
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    values = _read_json(file)
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise BadInput(f"{file} has no model_type, so it is not the config of a known model")
    if model_type not in transformers.CONFIG_MAPPING:
        near = _nearest(model_type, transformers.CONFIG_MAPPING.keys())
        raise BadInput(f"{file}: transformers has no model type {model_type!r}{near}")
    if "quantization_config" in values:
        raise BadInput(f"{file} is of a quantized model; remove quantization_config to train it")
    try:
        config = transformers.CONFIG_MAPPING[model_type].from_dict(values)
    except Exception as error:  # each config class checks its values in its own way
        raise BadInput(f"{file} is not a {model_type} config: {error}") from error
    return model_class(config), _for_training(config)


def model_class(config: Any) -> type[nn.Module]:
    """The class the config names under `architectures`, or else the usual one of its type."""
    transformers = _transformers()
    usual = _usual_classes(config.model_type)
    names = config.architectures or usual[:1]
    if not names:
        raise BadInput(
            f"model type {config.model_type!r} has no head oomph can train;"
            " name a class under architectures in its config"
        )
    cls: Any = getattr(transformers, str(names[0]), None)
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
    # As transformers' Trainer does: a training step has no use for a copy of all keys and values.
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return config


def _build(cls: Any, config: Any, *, initialise: bool) -> nn.Module:
    import torch
    from torch._guards import detect_fake_mode
    from torch.utils._python_dispatch import _disable_current_modes

    if detect_fake_mode() is not None:
        # Some constructors read values they derive from the config (a ramp of drop rates):
        # outside the modes those are real, and only what the model holds is made fake.
        with _disable_current_modes(), torch.device("meta"):
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
    """Replace every tensor the model holds by a new one under the modes now active."""
    import torch

    new: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for held in tables:
            for name, old in held.items():
                if isinstance(old, torch.Tensor):
                    if old not in new:
                        new[old] = _empty_as(old)
                    held[name] = new[old]


def _empty_as(old: torch.Tensor) -> torch.Tensor:
    import torch

    empty = torch.empty(old.shape, dtype=old.dtype)
    if isinstance(old, torch.nn.Parameter):
        return torch.nn.Parameter(empty, requires_grad=old.requires_grad)
    return empty


def _unscript(module: ModuleType) -> None:
    """Put the Python functions back where a model's file holds TorchScript (DeBERTa's does).

    Fake tensors cannot enter the TorchScript interpreter, and what is rehearsed must be what is
    run (rule 1).
    """
    import torch

    for name, value in list(vars(module).items()):
        if isinstance(value, torch.jit.ScriptFunction):
            setattr(module, name, value._torchdynamo_inline)  # type: ignore[attr-defined]


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"there is no {file}") from None
    except OSError as error:
        raise BadInput(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
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
