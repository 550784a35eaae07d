"""A config.json from anywhere: no network, no hub, no foreign code, and no model without end."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from oomph.errors import BadInput, OomphError
from oomph.jobs.models import known_models
from oomph.jobs.models.building import build_config, build_model, model_from_config_path
from oomph.jobs.models.foreign_config import without_reach
from oomph.jobs.models.size_limits import check_sizes

transformers = pytest.importorskip("transformers")
huggingface_hub = pytest.importorskip("huggingface_hub")

#: What reaches out, each with a value that would have something fetched.
HOSTILE = {
    "auto_map": {"AutoConfig": "evil/repo--configuration.Config"},
    "attn_implementation": "evil/kernels",
    "_attn_implementation": "kernels-community/flash-attn2",
    "_attn_implementation_internal": "evil/kernels:attention",
    "experts_implementation": "evil/experts",
    "_experts_implementation": "kernels-community/moe",
    "trust_remote_code": True,
    "custom_pipelines": {"x": {"impl": "evil.Pipeline"}},
    "_name_or_path": "evil/repo",
    "use_pretrained_backbone": True,
    "use_kernels": True,
    "backbone": "evil/backbone",
    "architecture": "hf-hub:evil/timm",
    "quantization_config": {"quant_method": "gptq"},
    "torch_dtype": "load",
    "dtype": "hub",
}
#: Those of them that a config can do without; the others are refused in words.
GOES_UNSAID = {
    "auto_map",
    "trust_remote_code",
    "custom_pipelines",
    "_name_or_path",
    "use_pretrained_backbone",
    "use_kernels",
}
TINY = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Whatever tries the network or the hub is written down, and fails."""
    tried: list[str] = []

    def recorder(name: str) -> Any:
        def refuse(*_: Any, **__: Any) -> None:
            tried.append(name)
            raise OSError(f"{name} is not there")

        return refuse

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, recorder(name))
    for name in ("create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, recorder(name))
    for name in (
        "repo_exists",
        "model_info",
        "hf_hub_download",
        "snapshot_download",
        "file_exists",
    ):
        monkeypatch.setattr(huggingface_hub.HfApi, name, recorder(name))
    for module, name in (
        (huggingface_hub.file_download, "_hf_hub_download_to_cache_dir"),
        (transformers.utils.hub, "hf_hub_download"),
        (transformers.dynamic_module_utils, "get_class_from_dynamic_module"),
        (transformers.integrations.hub_kernels, "get_kernel"),
    ):
        monkeypatch.setattr(module, name, recorder(name))
    yield tried


def config_file(folder: Path, values: Any) -> Path:
    file = folder / "config.json"
    file.write_text(values if isinstance(values, str) else json.dumps(values))
    return file


def wrapped(values: dict[str, Any], depth: int) -> dict[str, Any]:
    for name in ("text_config", "vision_config", "backbone_config")[:depth]:
        values = {name: [values]} if name == "backbone_config" else {name: values}
    return values


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("field", HOSTILE)
def test_what_reaches_out_is_taken_out_or_refused_at_any_depth(field: str, depth: int) -> None:
    values = wrapped({**TINY, field: HOSTILE[field]}, depth)
    if field in GOES_UNSAID:
        assert without_reach(values, "config.json") == wrapped(TINY, depth)
    else:
        with pytest.raises(BadInput, match=rf"config\.json: .*\b{field}\b"):
            without_reach(values, "config.json")


@pytest.mark.parametrize(
    "values",
    [
        {"attn_implementation": "sdpa"},
        {"_attn_implementation": {"": "eager", "vision_config": "sdpa"}},
        {"experts_implementation": "grouped_mm"},
        {"torch_dtype": "bfloat16"},
        {"dtype": "torch.float16"},
        {"dtype": "auto"},
        {"backbone": "resnet50"},
        {"backbone": None, "quantization_config": None},
        {"architecture": "vit_base_patch16_224.augreg_in21k"},
    ],
)
def test_what_stays_here_is_left_as_it_is(values: dict[str, Any]) -> None:
    assert without_reach(values, "config.json") == values


def test_no_type_of_model_reaches_out_while_its_config_is_read(
    tmp_path: Path, reached: list[str]
) -> None:
    """Each type there is, with every hostile field: alone at the top, and in each sub-config."""
    untyped = []
    for model_type in transformers.CONFIG_MAPPING:
        subs = transformers.CONFIG_MAPPING[model_type].sub_configs
        for field, value in HOSTILE.items():
            names = (
                [None, *subs]
                if field in ("attn_implementation", "backbone", "auto_map")
                else [None]
            )
            for sub in names:
                values = {"model_type": model_type}
                values.update({sub: {field: value}} if sub else {field: value})
                if field not in GOES_UNSAID:
                    with pytest.raises(BadInput):
                        without_reach(values, model_type)
                    continue
                cleaned = without_reach(values, model_type)
                assert field not in cleaned and field not in cleaned.get(sub, {})
        try:
            model_from_config_path(
                config_file(tmp_path, {"model_type": model_type, "use_pretrained_backbone": True})
            )
        except OomphError:
            pass
        except Exception as error:
            untyped.append((model_type, error))
    assert not untyped
    assert not reached


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "upernet", "backbone": "openmmlab/upernet-convnext-tiny"},
        {"model_type": "upernet", "backbone": "microsoft", "use_pretrained_backbone": True},
        {"model_type": "detr", "backbone": "facebook/detr", "use_timm_backbone": False},
        {"model_type": "detr", "backbone": "resnet50", "use_pretrained_backbone": True},
        {"model_type": "dpt", "backbone": "facebook/dinov2-base"},
        {"model_type": "dpt", "backbone": "gpt2", "use_timm_backbone": False},
        {"model_type": "dpt", "is_hybrid": True, "backbone_config": {"model_type": "bit"}},
        {"model_type": "llama", **TINY, "attn_implementation": "evil/kernel"},
        {"model_type": "llama", **TINY, "attn_implementation": "flash_attention_2"},
        {"model_type": "mixtral", **TINY, "_experts_implementation": "evil/kernel"},
        {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32},
        {"model_type": "edgetam"},
        {
            "model_type": "timm_wrapper",
            "architecture": "resnet18",
            "model_args": {"pretrained": True, "checkpoint_path": "/etc/passwd"},
        },
        {
            "model_type": "llava",
            "text_config": {"model_type": "llama", **TINY},
            "vision_config": {"model_type": "clip_vision_model", "_attn_implementation": "a/b"},
        },
        {"model_type": "encoder-decoder", "encoder": {"model_type": "bert"}, "decoder": "gpt2"},
        {"model_type": "musicgen", "text_encoder": "t5-base"},
        {"model_type": "rag", "question_encoder": {"model_type": "dpr"}, "generator": {}},
    ],
    ids=lambda values: values["model_type"],
)
def test_building_reaches_for_nothing(
    tmp_path: Path, reached: list[str], values: dict[str, Any]
) -> None:
    try:
        _, config = model_from_config_path(config_file(tmp_path, values))
        with torch.device("meta"):
            build_model(config)
    except OomphError:
        pass
    assert not reached


HUGE = [
    ("num_hidden_layers", 10**9),
    ("num_hidden_layers", 1e9),
    ("n_layer", 10**9),
    ("encoder_layers", 10**9),
    ("depths", [2, 2, 10**9]),
    ("max_position_embeddings", 10**12),
    ("n_positions", 10**12),
    ("num_labels", 10**8),
    ("num_labels", 10**6),
    ("vocab_size", 10**12),
    ("hidden_size", 10**12),
    ("intermediate_size", 10**10),
    ("num_attention_heads", 10**9),
    ("num_local_experts", 10**9),
    ("image_size", 10**9),
    ("whatever_it_is", 10**15),
    ("num_hidden_layers", -(10**9)),
    ("vocab_size", 10**400),
    ("num_hidden_layers", -(10**400)),
    ("vocab_size", float("inf")),
]


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize(("field", "value"), HUGE)
def test_what_no_model_has_is_refused_at_once(
    tmp_path: Path, field: str, value: Any, depth: int
) -> None:
    values = {"model_type": "llama", **TINY, **wrapped({field: value}, depth)}
    file = config_file(tmp_path, values)
    began = time.perf_counter()
    with pytest.raises(BadInput, match=rf"{field} is .* above the limit of [\d,]+"):
        model_from_config_path(file)
    assert time.perf_counter() - began < 2


def test_deep_and_long_configs_are_refused_at_once(tmp_path: Path) -> None:
    deep = '{"a":' * 500 + "{}" + "}" * 500
    text = '{"model_type": "llama", "x": ' + deep + "}"
    with pytest.raises(BadInput, match="deep"):
        model_from_config_path(config_file(tmp_path, text))
    with pytest.raises(BadInput, match=r"more than 2,000,000 values"):
        check_sizes({"suppress_tokens": [0] * 2_000_001}, "config.json")
    with pytest.raises(BadInput, match=r"text_config.depths is a list of 100,000, above the limit"):
        check_sizes({"text_config": {"depths": [2] * 100_000}}, "config.json")
    check_sizes({"suppress_tokens": [1] * 100_000, "depths": [2] * 1000}, "config.json")


def test_the_largest_models_there_are_stay_below_every_limit() -> None:
    largest = {
        "num_hidden_layers": 1000,
        "num_layers": 126,
        "max_position_embeddings": 100_000_000,
        "vocab_size": 1_000_000,
        "hidden_size": 65_536,
        "intermediate_size": 524_288,
        "num_attention_heads": 1024,
        "num_local_experts": 2048,
        "n_routed_experts": 4096,
        "num_experts_per_tok": 8,
        "shared_expert_intermediate_size": 131_072,
        "rope_theta": 10**12,
        "model_max_length": 10**30,
        "sliding_window": 262_144,
        "image_size": 4096,
        "num_labels": 203_094,
        "eos_token_id": [151_645, 151_643],
        "rope_scaling": {"original_max_position_embeddings": 10_485_760, "factor": 64.0},
        "mask_value": -(10**9),
        "time_step_limit": [0.0, float("inf")],
    }
    check_sizes(largest, "config.json")
    check_sizes({"text_config": largest, "vision_config": {"depths": [2, 2, 18, 2]}}, "config.json")


def test_the_defaults_of_every_type_and_the_whole_catalogue_stay_below_every_limit() -> None:
    for model_type in (
        "llama",
        "mamba2",
        "bamba",
        "swin",
        "detr",
        "whisper",
        "t5",
        "funnel",
        "bert",
    ):
        values = json.loads(json.dumps(transformers.CONFIG_MAPPING[model_type]().to_dict()))
        check_sizes(values, model_type)
        without_reach(values, model_type)
    for entry in known_models().values():
        values = json.loads(json.dumps(build_config(entry).to_dict()))
        check_sizes(values, entry.name)
        without_reach(values, entry.name)


@pytest.mark.parametrize("named", [5, "LlamaForCausalLM", [5], [None], ["os.system"], [["x"]], {}])
def test_a_class_is_named_in_a_list_of_those_there_are(tmp_path: Path, named: Any) -> None:
    values = {"model_type": "llama", **TINY, "architectures": named}
    try:
        cls, _ = model_from_config_path(config_file(tmp_path, values))
    except BadInput:
        return
    assert cls.__name__ == "LlamaForCausalLM"
