"""Language models of transformers that predict the next token: dense, and with a recurrence."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo import batches as made
from benchmarks.zoo.hub import hub


def _of_one_length() -> list[dict[str, Any]]:
    return [{key: leaf.repeat(1, 2)[:, :24] for key, leaf in one.items()} for one in made.texts()]


hub("gpt2", "gpt2", "GPT2LMHeadModel", made.texts)
hub("openai-gpt", "openai-gpt", "OpenAIGPTLMHeadModel", made.texts)
hub(
    "gpt-neo",
    "gpt_neo",
    "GPTNeoForCausalLM",
    made.texts,
    attention_types=[[["global", "local"], 2]],
)
hub("gpt-neox", "gpt_neox", "GPTNeoXForCausalLM", made.texts)
hub("gptj", "gptj", "GPTJForCausalLM", made.texts)
hub("codegen", "codegen", "CodeGenForCausalLM", made.texts)
hub("gpt-bigcode", "gpt_bigcode", "GPTBigCodeForCausalLM", made.texts)
hub("opt", "opt", "OPTForCausalLM", made.texts)
hub("bloom", "bloom", "BloomForCausalLM", made.texts)
hub("falcon", "falcon", "FalconForCausalLM", made.texts, ffn_hidden_size=128)
hub("mpt", "mpt", "MptForCausalLM", made.texts)
hub("llama", "llama", "LlamaForCausalLM", made.texts)
hub("llama-unpadded", "llama", "LlamaForCausalLM", lambda: made.texts(padded=False))
hub("mistral", "mistral", "MistralForCausalLM", made.texts)
hub("qwen2", "qwen2", "Qwen2ForCausalLM", made.texts)
hub("qwen3", "qwen3", "Qwen3ForCausalLM", made.texts)
hub("gemma", "gemma", "GemmaForCausalLM", made.texts)
hub("gemma2", "gemma2", "Gemma2ForCausalLM", made.texts)
hub("gemma3", "gemma3_text", "Gemma3ForCausalLM", made.texts)
hub(
    "gemma3n",
    "gemma3n_text",
    "Gemma3nForCausalLM",
    made.texts,
    num_kv_shared_layers=1,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=made.VOCABULARY,
    laurel_rank=4,
    intermediate_size=[64] * 4,
    activation_sparsity_pattern=[0.5, 0.0, 0.5, 0.0],
)
hub("phi", "phi", "PhiForCausalLM", made.texts)
hub("phi3", "phi3", "Phi3ForCausalLM", made.texts)
hub("cohere", "cohere", "CohereForCausalLM", made.texts)
hub("cohere2", "cohere2", "Cohere2ForCausalLM", made.texts)
hub("stablelm", "stablelm", "StableLmForCausalLM", made.texts)
hub("starcoder2", "starcoder2", "Starcoder2ForCausalLM", made.texts)
hub("olmo", "olmo", "OlmoForCausalLM", made.texts)
hub("olmo2", "olmo2", "Olmo2ForCausalLM", made.texts)
hub("granite", "granite", "GraniteForCausalLM", made.texts)
hub("glm4", "glm4", "Glm4ForCausalLM", made.texts)
hub("smollm3", "smollm3", "SmolLM3ForCausalLM", made.texts)
hub("nemotron", "nemotron", "NemotronForCausalLM", made.texts, num_key_value_heads=2, head_dim=8)
hub("persimmon", "persimmon", "PersimmonForCausalLM", made.texts)
hub("exaone4", "exaone4", "Exaone4ForCausalLM", made.texts)
hub("diffllama", "diffllama", "DiffLlamaForCausalLM", made.texts)
hub("bitnet", "bitnet", "BitNetForCausalLM", made.texts)
hub("modernbert-decoder", "modernbert-decoder", "ModernBertDecoderForCausalLM", made.texts)
hub("xglm", "xglm", "XGLMForCausalLM", made.texts, attention_heads=4)
hub("biogpt", "biogpt", "BioGptForCausalLM", made.texts)
hub("ctrl", "ctrl", "CTRLLMHeadModel", made.texts, dff=64)
hub("xlnet", "xlnet", "XLNetLMHeadModel", lambda: made.texts("masked"), d_inner=64)
hub(
    "reformer",
    "reformer",
    "ReformerModelWithLMHead",
    _of_one_length,
    draws=True,
    attn_layers=["local", "lsh", "local", "lsh"],
    attention_head_size=8,
    feed_forward_size=64,
    axial_pos_embds=False,
    is_decoder=True,
    lsh_attn_chunk_length=8,
    local_attn_chunk_length=8,
    num_buckets=4,
    num_hashes=1,
    hash_seed=0,
)
hub(
    "mamba",
    "mamba",
    "MambaForCausalLM",
    made.texts,
    time_step_rank=4,
    expand=2,
    intermediate_size=64,
)
hub("mamba2", "mamba2", "Mamba2ForCausalLM", made.texts, num_heads=8, n_groups=2, chunk_size=8)
hub("falcon-mamba", "falcon_mamba", "FalconMambaForCausalLM", made.texts, time_step_rank=4)
hub("rwkv", "rwkv", "RwkvForCausalLM", made.texts, attention_hidden_size=32)
hub(
    "recurrent-gemma",
    "recurrent_gemma",
    "RecurrentGemmaForCausalLM",
    made.texts,
    lru_width=32,
    attention_window_size=8,
)
hub("lfm2", "lfm2", "Lfm2ForCausalLM", made.texts)
