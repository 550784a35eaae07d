"""Models of transformers that read one text and write another."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo import batches as made
from benchmarks.zoo.hub import hub


def _shifted() -> list[dict[str, Any]]:
    batches = made.translations()
    for batch in batches:
        said = batch["labels"].clamp(min=0)
        batch["decoder_input_ids"] = torch.nn.functional.pad(said, (1, -1), value=2)
    return batches


hub("t5", "t5", "T5ForConditionalGeneration", made.translations)
hub("mt5", "mt5", "MT5ForConditionalGeneration", made.translations)
hub("umt5", "umt5", "UMT5ForConditionalGeneration", made.translations)
hub("longt5", "longt5", "LongT5ForConditionalGeneration", made.translations, local_radius=4)
hub(
    "longt5-global",
    "longt5",
    "LongT5ForConditionalGeneration",
    made.translations,
    local_radius=4,
    global_block_size=4,
    encoder_attention_type="transient-global",
)
hub("bart", "bart", "BartForConditionalGeneration", made.translations)
hub("mbart", "mbart", "MBartForConditionalGeneration", made.translations)
hub("marian", "marian", "MarianMTModel", made.translations, decoder_vocab_size=made.VOCABULARY)
hub("blenderbot", "blenderbot", "BlenderbotForConditionalGeneration", made.translations)
hub("pegasus", "pegasus", "PegasusForConditionalGeneration", made.translations)
hub("pegasus-x", "pegasus_x", "PegasusXForConditionalGeneration", made.translations, block_size=8)
hub("plbart", "plbart", "PLBartForConditionalGeneration", made.translations)
hub("m2m100", "m2m_100", "M2M100ForConditionalGeneration", made.translations)
hub("nllb-moe", "nllb-moe", "NllbMoeForConditionalGeneration", made.translations)
hub("mvp", "mvp", "MvpForConditionalGeneration", made.translations)
hub("led", "led", "LEDForConditionalGeneration", made.translations, attention_window=[8] * 2)
hub(
    "prophetnet",
    "prophetnet",
    "ProphetNetForConditionalGeneration",
    made.translations,
    num_encoder_attention_heads=4,
    num_decoder_attention_heads=4,
)
hub(
    "fsmt",
    "fsmt",
    "FSMTForConditionalGeneration",
    _shifted,
    langs=["en", "de"],
    src_vocab_size=96,
    tgt_vocab_size=96,
)
hub(
    "t5gemma",
    "t5gemma",
    "T5GemmaForConditionalGeneration",
    made.translations,
    decoder__cross_attention_hidden_size=32,
)
