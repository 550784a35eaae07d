"""Adapters of peft over small models of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.courses import Training
from benchmarks.zoo import batches as made
from benchmarks.zoo.entries import enter
from benchmarks.zoo.hub import shrink


def peft(
    name: str,
    kind: str,
    head: str,
    adapter: str,
    batches: Callable[[], Sequence[Any]] = made.texts,
    **settings: Any,
) -> None:
    """Enter an adapter over a model."""

    def make() -> Training:
        import peft as library
        import transformers

        config = shrink(transformers.AutoConfig.for_model(kind), {})
        if getattr(config, "is_encoder_decoder", False):
            config.decoder_start_token_id = 1
        adapted = library.get_peft_model(
            getattr(transformers, head)(config), getattr(library, adapter)(**settings)
        )
        trained = [p for p in adapted.parameters() if p.requires_grad]
        steps = torch.optim.AdamW(trained, lr=1e-3)
        return Training(model=adapted, loss=None, optimizer=steps, batches=batches())

    enter(name, "peft", make)


_QUERIES = ["q_proj", "v_proj"]
_llama = partial(peft, kind="llama", head="LlamaForCausalLM")
_llama("lora", adapter="LoraConfig", r=4, target_modules=_QUERIES, task_type="CAUSAL_LM")
_llama(
    "lora-everywhere", adapter="LoraConfig", r=4, target_modules="all-linear", task_type="CAUSAL_LM"
)
_llama(
    "lora-rank-stable",
    adapter="LoraConfig",
    r=4,
    use_rslora=True,
    bias="lora_only",
    target_modules=_QUERIES,
    modules_to_save=["lm_head"],
    task_type="CAUSAL_LM",
)
_llama(
    "dora", adapter="LoraConfig", r=4, use_dora=True, target_modules=_QUERIES, task_type="CAUSAL_LM"
)
_llama("ia3", adapter="IA3Config", task_type="CAUSAL_LM")
_llama("prefix-tuning", adapter="PrefixTuningConfig", num_virtual_tokens=3, task_type="CAUSAL_LM")
_llama("prompt-tuning", adapter="PromptTuningConfig", num_virtual_tokens=3, task_type="CAUSAL_LM")
_llama(
    "p-tuning",
    adapter="PromptEncoderConfig",
    num_virtual_tokens=3,
    encoder_hidden_size=16,
    task_type="CAUSAL_LM",
)
_llama(
    "adalora",
    adapter="AdaLoraConfig",
    target_modules=_QUERIES,
    task_type="CAUSAL_LM",
    total_step=100,
)
_llama("loha", adapter="LoHaConfig", r=4, target_modules=_QUERIES, task_type="CAUSAL_LM")
_llama("lokr", adapter="LoKrConfig", r=4, target_modules=_QUERIES, task_type="CAUSAL_LM")
_llama("vera", adapter="VeraConfig", r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
_llama(
    "boft",
    adapter="BOFTConfig",
    boft_block_size=4,
    target_modules=["q_proj"],
    task_type="CAUSAL_LM",
)
peft(
    "lora-bert",
    "bert",
    "BertForSequenceClassification",
    "LoraConfig",
    partial(made.texts, "class", classes=5),
    r=4,
    task_type="SEQ_CLS",
    target_modules=["query", "value"],
)
peft(
    "lora-t5",
    "t5",
    "T5ForConditionalGeneration",
    "LoraConfig",
    made.translations,
    r=4,
    task_type="SEQ_2_SEQ_LM",
    target_modules=["q", "v"],
)
