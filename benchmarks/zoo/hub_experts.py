"""Language models of transformers with mixtures of experts."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from benchmarks.zoo import batches as made
from benchmarks.zoo.hub import hub


def with_router_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that evens out how experts are used, added as its model does."""
    loss: Tensor = model(**batch, output_router_logits=True).loss
    return loss


hub("mixtral", "mixtral", "MixtralForCausalLM", made.texts)
hub("mixtral-router-loss", "mixtral", "MixtralForCausalLM", made.texts, with_router_loss)
hub("qwen2-moe", "qwen2_moe", "Qwen2MoeForCausalLM", made.texts)
hub("qwen3-moe", "qwen3_moe", "Qwen3MoeForCausalLM", made.texts)
hub(
    "qwen3-next",
    "qwen3_next",
    "Qwen3NextForCausalLM",
    made.texts,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
hub("phimoe", "phimoe", "PhimoeForCausalLM", made.texts, router_jitter_noise=0.0)
hub("olmoe", "olmoe", "OlmoeForCausalLM", made.texts)
hub("gpt-oss", "gpt_oss", "GptOssForCausalLM", made.texts)
hub(
    "deepseek-v2",
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    made.texts,
    num_key_value_heads=4,
    head_dim=4,
)
hub(
    "deepseek-v3",
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    made.texts,
    num_key_value_heads=4,
    head_dim=4,
)
hub("granitemoe", "granitemoe", "GraniteMoeForCausalLM", made.texts)
hub(
    "granitemoehybrid",
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    made.texts,
    mamba_n_heads=8,
    mamba_d_head=8,
    mamba_d_state=4,
    mamba_chunk_size=8,
    shared_intermediate_size=32,
    layer_types=["linear_attention", "full_attention"] * 2,
)
hub("glm4-moe", "glm4_moe", "Glm4MoeForCausalLM", made.texts)
hub(
    "ernie4-5-moe",
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    made.texts,
    moe_num_experts=4,
    moe_k=2,
)
hub("llama4", "llama4_text", "Llama4ForCausalLM", made.texts, intermediate_size_mlp=64)
hub(
    "jamba",
    "jamba",
    "JambaForCausalLM",
    made.texts,
    mamba_d_state=4,
    mamba_dt_rank=4,
    attn_layer_period=2,
    attn_layer_offset=1,
    use_mamba_kernels=False,
)
hub("minimax", "minimax", "MiniMaxForCausalLM", made.texts, block_size=8)
hub(
    "switch", "switch_transformers", "SwitchTransformersForConditionalGeneration", made.translations
)
