"""Encoders of text of transformers, each with a head that its users train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.zoo import batches as made
from benchmarks.zoo.hub import hub

_masked = partial(made.texts, "masked")
_each = partial(made.texts, "each", classes=5)
_classes = partial(made.texts, "class", classes=5)
_spans = partial(made.texts, "span")


def choices() -> list[dict[str, Any]]:
    """Questions with three answers each, of which one is right."""
    batches = []
    for size, length, stream in made.shapes():
        ids = torch.randint(5, made.VOCABULARY, (size, 3, length), generator=stream)
        right = torch.randint(3, (size,), generator=stream)
        batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": right})
    return batches


def sentence_pairs() -> list[dict[str, Any]]:
    """Masked tokens, and whether a sentence follows the other."""
    batches: list[dict[str, Any]] = made.texts("masked")
    for (size, _, stream), batch in zip(made.shapes(), batches, strict=True):
        batch["next_sentence_label"] = torch.randint(2, (size,), generator=stream)
    return batches


def on_pages(make: Callable[[], Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Texts, with where each token stands on its page."""
    batches = list(make())
    for (size, length, stream), batch in zip(made.shapes(), batches, strict=True):
        corners = torch.randint(30, (size, length, 2), generator=stream)
        batch["bbox"] = torch.cat([corners, corners + 5], dim=-1)
    return batches


def cells() -> list[dict[str, Any]]:
    """Tables as texts; each token belongs to a row and a column."""
    batches = []
    for batch, (size, length, stream) in zip(made.texts("each"), made.shapes(), strict=True):
        kinds = torch.randint(3, (size, length, 7), generator=stream)
        kinds[..., 0] = 1
        labels = batch["labels"].clamp(min=0)
        batches.append({**batch, "token_type_ids": kinds, "labels": labels})
    return batches


hub("bert-classes", "bert", "BertForSequenceClassification", _classes)
hub("bert-masked", "bert", "BertForMaskedLM", _masked)
hub("bert-pretraining", "bert", "BertForPreTraining", sentence_pairs)
hub("roberta-spans", "roberta", "RobertaForQuestionAnswering", _spans, num_labels=2)
hub("xlm-roberta-tokens", "xlm-roberta", "XLMRobertaForTokenClassification", _each)
hub("camembert-choices", "camembert", "CamembertForMultipleChoice", choices)
hub("distilbert-tokens", "distilbert", "DistilBertForTokenClassification", _each)
hub("albert-masked", "albert", "AlbertForMaskedLM", _masked)
hub("electra-detects", "electra", "ElectraForPreTraining", partial(made.texts, "each"))
hub("deberta-masked", "deberta", "DebertaForMaskedLM", _masked)
hub(
    "deberta-v2-classes",
    "deberta-v2",
    "DebertaV2ForSequenceClassification",
    _classes,
    pooler_hidden_size=32,
)
hub("mpnet-masked", "mpnet", "MPNetForMaskedLM", _masked)
hub("fnet-masked", "fnet", "FNetForMaskedLM", partial(made.texts, "masked", padded=False))
hub("funnel-tokens", "funnel", "FunnelForTokenClassification", _each, block_sizes=[2, 2, 2])
hub("longformer-masked", "longformer", "LongformerForMaskedLM", _masked, attention_window=[8] * 4)
hub(
    "big-bird-masked",
    "big_bird",
    "BigBirdForMaskedLM",
    _masked,
    block_size=4,
    num_random_blocks=1,
    attention_type="original_full",
)
hub("roformer-masked", "roformer", "RoFormerForMaskedLM", _masked)
hub("rembert-tokens", "rembert", "RemBertForTokenClassification", _each)
hub("modernbert-masked", "modernbert", "ModernBertForMaskedLM", _masked)
hub("modernbert-classes", "modernbert", "ModernBertForSequenceClassification", _classes)
hub("convbert-spans", "convbert", "ConvBertForQuestionAnswering", _spans, num_labels=2)
hub(
    "mobilebert-masked",
    "mobilebert",
    "MobileBertForMaskedLM",
    _masked,
    intra_bottleneck_size=16,
    true_hidden_size=16,
    embedding_size=16,
)
hub("squeezebert-classes", "squeezebert", "SqueezeBertForSequenceClassification", _classes)
hub("megatron-bert-masked", "megatron-bert", "MegatronBertForMaskedLM", _masked)
hub("ibert-masked", "ibert", "IBertForMaskedLM", _masked)
hub("xlm-masked", "xlm", "XLMWithLMHeadModel", _masked)
hub("flaubert-classes", "flaubert", "FlaubertForSequenceClassification", _classes)
hub("nystromformer-classes", "nystromformer", "NystromformerForSequenceClassification", _classes)
hub("yoso-masked", "yoso", "YosoForMaskedLM", _masked, use_expectation=True)
hub(
    "esm-masked",
    "esm",
    "EsmForMaskedLM",
    _masked,
    mask_token_id=3,
    token_dropout=False,
    pad_token_id=0,
    position_embedding_type="rotary",
)
hub("canine-classes", "canine", "CanineForSequenceClassification", _classes)
hub(
    "luke-classes",
    "luke",
    "LukeForSequenceClassification",
    _classes,
    entity_vocab_size=8,
    entity_emb_size=8,
)
hub("layoutlm-tokens", "layoutlm", "LayoutLMForTokenClassification", lambda: on_pages(_each))
hub(
    "layoutlmv3-tokens",
    "layoutlmv3",
    "LayoutLMv3ForTokenClassification",
    lambda: on_pages(_each),
    coordinate_size=6,
    shape_size=4,
    visual_embed=False,
)
hub(
    "lilt-tokens",
    "lilt",
    "LiltForTokenClassification",
    lambda: on_pages(_each),
    hidden_size=48,
    channel_shrink_ratio=4,
)
hub("tapas-cells", "tapas", "TapasForQuestionAnswering", cells, type_vocab_sizes=[3] * 7)
hub(
    "perceiver-masked",
    "perceiver",
    "PerceiverForMaskedLM",
    lambda: _of_full_length(),
    num_latents=8,
    d_latents=32,
)


def _of_full_length() -> list[dict[str, Any]]:
    batches = []
    for batch, (_, length, _) in zip(_masked(), made.shapes(), strict=True):
        right = 64 - length
        labels = torch.nn.functional.pad(batch["labels"], (0, right), value=-100)
        ids, mask = (
            torch.nn.functional.pad(batch[name], (0, right))
            for name in ("input_ids", "attention_mask")
        )
        batches.append({"inputs": ids, "attention_mask": mask, "labels": labels})
    return batches
