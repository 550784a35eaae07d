"""How a model of transformers becomes a training of a few thousand weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.courses import Training
from benchmarks.zoo import batches as made
from benchmarks.zoo.entries import enter

#: What a config of any model gets, where it has a setting of that name.
_SMALL: dict[str, Any] = {
    "vocab_size": made.VOCABULARY,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "embed_dim": 32,
    "word_embed_proj_dim": 32,
    "emb_dim": 32,
    "num_hidden_layers": 4,
    "num_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_decoder_layers": 2,
    "num_encoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "d_ff": 64,
    "n_inner": 64,
    "hidden_dim": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "d_kv": 8,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "qk_head_dim": 8,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "max_seq_len": 64,
    "n_ctx": 64,
    "sliding_window": 16,
    "state_size": 4,
    "embedding_size": 32,
    "image_size": 32,
    "patch_size": 8,
    "projection_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "rotary_dim": 4,
    "attention_window": 8,
    "num_labels": 5,
    "image_token_id": 4,
    "video_token_id": 3,
}
#: Chance would keep parts of a batch from being comparable to the whole.
_NO_CHANCE = (
    "dropout",
    "drop",
    "pdrop",
    "drop_path_rate",
    "layerdrop",
    "mask_time_prob",
    "mask_feature_prob",
    "mask_prob",
    "router_jitter_noise",
)
#: Settings whose absence means something.
_MAY_BE_ABSENT = (
    "q_lora_rank",
    "n_inner",
    "sliding_window",
    "embedding_size",
    "intermediate_size",
    "head_dim",
    "num_key_value_heads",
)


def shrink(config: Any, settings: Mapping[str, Any]) -> Any:
    """The config with few, narrow layers and no dropout; its parts, too."""
    known = config.to_dict()
    for name in known:
        value = getattr(config, name, None)
        if hasattr(value, "to_dict"):
            shrink(value, {})
        elif (name.endswith(_NO_CHANCE) or "dropout" in name) and isinstance(value, int | float):
            setattr(config, name, type(value)(0))
        elif (
            name in _SMALL
            and isinstance(value, int | type(None))
            and (value is not None or not name.endswith("_id"))
        ):
            if value is None and name in _MAY_BE_ABSENT:
                continue
            setattr(config, name, _SMALL[name])
    if "id2label" in known and "num_labels" not in settings:
        config.num_labels = 5
    for name, value in settings.items():
        place, _, last = name.rpartition(".")
        made = value() if callable(value) else value
        setattr(getattr(config, place) if place else config, last, made)
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        if name in known and name not in settings and getattr(config, name, None):
            count = getattr(config, "num_hidden_layers", 4)
            kinds = list(dict.fromkeys(getattr(config, name)))
            setattr(config, name, [kinds[at % len(kinds)] for at in range(count)])
    return config


def hub_training(
    kind: str,
    head: str,
    batches: Callable[[], Sequence[Any]],
    settings: Mapping[str, Any],
    loss: Callable[..., Any] | None = None,
    optimizer: str = "sgd",
) -> Training:
    """A training of a model of transformers by its kind and its head's class."""
    import transformers

    config = transformers.AutoConfig.for_model(kind)
    shrink(config, settings)
    if getattr(config, "is_encoder_decoder", False):
        config.decoder_start_token_id = 1
    model = getattr(transformers, head)(config)
    trained = [p for p in model.parameters() if p.requires_grad]
    steps = (
        torch.optim.AdamW(trained, lr=1e-3)
        if optimizer == "adamw"
        else torch.optim.SGD(trained, lr=0.01, momentum=0.9)
    )
    return Training(model=model, loss=loss, optimizer=steps, batches=batches())


def hub(
    name: str,
    kind: str,
    head: str,
    batches: Callable[[], Sequence[Any]],
    loss: Callable[..., Any] | None = None,
    draws: bool = False,
    **settings: Any,
) -> None:
    """Enter a model of transformers with the settings of its config.

    `a__b` sets what its part `a` calls `b`; an underscore behind a name is left off.
    """
    flat = {key.rstrip("_").replace("__", "."): value for key, value in settings.items()}
    optimizer = "adamw" if len(name) % 2 else "sgd"

    def make() -> Training:
        return hub_training(kind, head, batches, flat, loss, optimizer)

    enter(name, "transformers", make, draws=draws)
