"""Sequences whose labels end at different places, and models that learn them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 4096
LENGTH = 16


class Ragged(Dataset[dict[str, Tensor]]):
    """The first three samples have hardly a label, so that parts of a batch differ a lot."""

    def __init__(self, count: int = 21, length: int = LENGTH) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, VOCABULARY, (count, length), generator=generator)
        ends = torch.randint(2, length, (count,), generator=generator)
        ends[:3] = 1  # not one label that a causal model predicts
        behind = torch.arange(length)[None] >= ends[:, None]
        self.labels = self.tokens.masked_fill(behind, -100)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def tiny_llama(**settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
            use_cache=False,
            **settings,
        )
    )


BLOCKS = ("model.layers.0", "model.layers.1")


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_weights(model: nn.Module, expected: nn.Module, tolerance: float = 1e-4) -> None:
    found, wanted = model.state_dict(), expected.state_dict()
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance)


def assert_plain(model: nn.Module) -> None:
    """Nothing that a plan does is left on any module."""
    for path, module in model.named_modules():
        changed = {"forward", "_oomph_applied", "training_step", "log"} & vars(module).keys()
        assert not changed, f"{path} has {changed}"
