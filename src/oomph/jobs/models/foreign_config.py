"""A config.json from any source: references beyond the file are removed or refused.

Configs can name code, weights and kernels that are elsewhere, at any depth: a sub-config may
contain anything that the whole one may. Here a model is built from the numbers alone.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from oomph.errors import BadInput

#: Where code, weights or files come from; building the model needs none of them.
_DROPPED = {
    "_name_or_path",
    "auto_map",
    "cache_dir",
    "checkpoint_path",
    "custom_pipelines",
    "kernel_config",
    "name_or_path",
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "trust_remote_code",
    "use_kernels",
    "use_pretrained_backbone",
}
_QUANTIZED = {"compression_config", "quantization_config"}
_IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation(_internal|_autoset)?")
#: Kernels of PyTorch itself, and the package of each other kernel that needs no download.
_OWN_KERNELS = {"batched_mm", "eager", "flex_attention", "grouped_mm", "sdpa"}
_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
#: Keys whose string names a timm architecture or a model on the hub.
_NAMED = {"architecture", "backbone"}
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_DTYPES = {"dtype", "torch_dtype"}


def without_reach(values: Mapping[str, Any], source: object) -> dict[str, Any]:
    """The same config without anything that would be fetched, imported or read from elsewhere."""
    return _clean_all(values, "", source)


_NOTHING = object()


def _clean_all(values: Mapping[str, Any], inside: str, source: object) -> dict[str, Any]:
    dropped = _DROPPED
    if isinstance(values.get("backbone_config"), dict):
        dropped = dropped | {"backbone"}  # redundant: its config is given in full
    cleaned = {
        key: _clean(key, value, where=f"{inside}{key}", source=source)
        for key, value in values.items()
        if key not in dropped
    }
    return {key: value for key, value in cleaned.items() if value is not _NOTHING}


def _clean(key: str, value: Any, *, where: str, source: object) -> Any:
    """The value as it may stay, or `_NOTHING`; `where` is its path from the top."""
    check = _check_for(key)
    if check is not None and value is not None:
        value = check(value, f"{source}: {where}")
    if isinstance(value, dict):
        return _clean_all(value, f"{where}.", source)
    if isinstance(value, list):
        # Items of a list are judged by the list's name.
        items = [_clean(key, item, where=where, source=source) for item in value]
        return [item for item in items if item is not _NOTHING]
    return value


def _check_for(key: str) -> Callable[[Any, str], Any] | None:
    if key in _QUANTIZED:
        return _refuse_quantized
    if key in _NAMED:
        return _plain_name
    if key in _DTYPES:
        return _dtype
    return _implementation if _IMPLEMENTATION.fullmatch(key) else None


def _refuse_quantized(_: Any, where: str) -> Any:
    name = where.rpartition(".")[2].rpartition(" ")[2]
    raise BadInput(f"{where} says that the model is quantized; remove {name} to train it")


def _plain_name(value: Any, where: str) -> Any:
    if isinstance(value, str) and not _PLAIN_NAME.fullmatch(value):
        raise BadInput(
            f"{where} is {value[:100]!r}, a model that lies elsewhere; nothing is fetched: write"
            " that model's own config under backbone_config, or the name of a timm architecture"
        )
    return value


def _implementation(value: Any, where: str) -> Any:
    """Allow a name, or one per sub-config; drop a boolean, which only asks to find one."""
    if isinstance(value, bool):
        return _NOTHING
    for name in value.values() if isinstance(value, dict) else [value]:
        if name is None or (isinstance(name, str) and _is_here(name)):
            continue
        raise BadInput(
            f"{where} is {str(name)[:100]!r}, and kernels are not fetched: remove it, or write"
            ' "sdpa" or "eager"'
        )
    return value


def _is_here(name: str) -> bool:
    name = name.removeprefix("paged|")
    package = _PACKAGES.get(name)
    return name in _OWN_KERNELS or (
        package is not None and importlib.util.find_spec(package) is not None
    )


def _dtype(value: Any, where: str) -> Any:
    for name in value.values() if isinstance(value, dict) else [value]:
        plain = name.removeprefix("torch.") if isinstance(name, str) else name
        is_dtype = isinstance(plain, str) and isinstance(getattr(torch, plain, None), torch.dtype)
        if name not in (None, "auto") and not is_dtype:
            raise BadInput(f"{where} is {str(name)[:100]!r}, which is no dtype of PyTorch")
    return value
