"""The properties of a model that memory and arithmetic depend on: numbers only, no tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oomph.jobs.blocks import repeated_blocks
from oomph.torch_compat.modules import parameters_of
from oomph.torch_compat.pytree import tree_leaves

#: A linear layer that widens or narrows by at least this factor is a feed-forward one.
_WIDENS = 1.5


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """The parts of a model that advice refers to."""

    parameters: int
    trainable: int
    weight_bytes: int
    """Bytes per parameter, on average."""
    embedding: str
    """The path of the largest embedding; empty if there is none."""
    vocabulary: int
    width: int
    head: str
    """The path of the layer that computes scores over the vocabulary."""
    tied: bool
    blocks: int
    block_parameters: int
    """Parameters of one block."""
    feed_forward: int
    """Parameters of all blocks' feed-forward layers."""
    linear: tuple[tuple[int, int], ...]
    """Sizes of the blocks' linear layers."""
    has_experts: bool
    heads: int
    """Attention heads, if the config says; else 0."""
    layers: int
    attention: str
    """`eager`, `sdpa` …, if the config says."""
    can_use_sdpa: bool
    window: int
    """Tokens that attention looks back; 0 for all."""
    trains_embedding: bool


def examine(model: nn.Module) -> Anatomy:
    """Determine a model's anatomy."""
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    path, embedding = _largest_embedding(model)
    head_path, head = _head(model, embedding)
    blocks = _blocks(model)
    linear = [shape for block in blocks for shape in _linear_layers(block)]
    config = getattr(model, "config", None)
    return Anatomy(
        parameters=count,
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        weight_bytes=size // max(count, 1),
        embedding=path,
        vocabulary=embedding.num_embeddings if embedding is not None else 0,
        width=embedding.embedding_dim if embedding is not None else 0,
        head=head_path,
        tied=head is not None and embedding is not None and head.weight is embedding.weight,
        blocks=len(blocks),
        block_parameters=sum(p.numel() for p in blocks[0].parameters()) if blocks else 0,
        feed_forward=sum(
            rows * columns
            for path, rows, columns in linear
            if _is_feed_forward(path, rows, columns)
        ),
        linear=tuple((rows, columns) for _, rows, columns in linear),
        has_experts=any("expert" in name.lower() for name, _ in model.named_modules()),
        heads=_number(config, "num_attention_heads", "n_head", "num_heads"),
        layers=_number(config, "num_hidden_layers", "n_layer", "num_layers") or len(blocks),
        attention=str(getattr(config, "_attn_implementation", "") or ""),
        can_use_sdpa=bool(getattr(model, "_supports_sdpa", False)),
        window=_number(config, "sliding_window"),
        trains_embedding=embedding is not None and embedding.weight.requires_grad,
    )


def token_shape(batch: Any) -> tuple[int, int]:
    """Number of samples and tokens per sample, if the batch is made of tokens; else zeros."""
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
        batch = batch["input_ids"]
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() == 2 and leaf.dtype is torch.int64:
            return leaf.shape[0], leaf.shape[1]
    return 0, 0


def _largest_embedding(model: nn.Module) -> tuple[str, nn.Embedding | None]:
    found = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.Embedding)]
    if not found:
        return "", None
    return max(found, key=lambda one: one[1].weight.numel())


def _head(model: nn.Module, embedding: nn.Embedding | None) -> tuple[str, nn.Linear | None]:
    """The linear layer as wide as the vocabulary."""
    for path, module in model.named_modules():
        if (
            embedding is not None
            and isinstance(module, nn.Linear)
            and module.out_features == embedding.num_embeddings
        ):
            return path, module
    return "", None


def _blocks(model: nn.Module) -> Sequence[nn.Module]:
    """The largest family of repeated modules of one class."""
    found = repeated_blocks(model)
    kinds: dict[type, list[nn.Module]] = {}
    for block in found:
        kinds.setdefault(type(block), []).append(block)
    return max(kinds.values(), key=_weights, default=[])


def _weights(blocks: Sequence[nn.Module]) -> int:
    return sum(parameter.numel() for block in blocks for parameter in block.parameters())


def _linear_layers(block: nn.Module) -> Iterator[tuple[str, int, int]]:
    """Paths and sizes of modules that are a single matrix product, whatever their class."""
    for path, module in block.named_modules():
        weight = parameters_of(module).get("weight")
        if weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding):
            yield path, weight.shape[0], weight.shape[1]


def _is_feed_forward(path: str, rows: int, columns: int) -> bool:
    # A joint layer for queries, keys and values widens, too.
    attends = "attn" in path.lower() or "attention" in path.lower()
    return not attends and max(rows, columns) >= _WIDENS * min(rows, columns)


def _number(config: Any, *names: str) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0
