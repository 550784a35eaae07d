"""Advice: each thing an architecture pays for is found where it is, and nowhere else."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import oomph
from oomph.advising import suggestions
from oomph.advising.anatomy import examine
from oomph.advising.costs import cost_of
from oomph.advising.suggestions import Suggestion

VOCABULARY, WIDTH = 1003, 32


class Block(nn.Module):
    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.attn(x).split(WIDTH, dim=-1)
        if self.fused:
            x = x + nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            x = x + (q @ k.transpose(1, 2)).softmax(-1) @ v
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, *, tied: bool = False, fused: bool = True, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(fused=fused) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(model, tokens):
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


@functools.cache
def advice(optimizer="sgd", precision="fp32", given=False, **options) -> dict[str, Suggestion]:
    """What is suggested, by topic; of one topic what saves most."""

    def build() -> Model:
        return Model(**options)

    tokens = torch.ones(2, 64, dtype=torch.long)
    model = build() if given else build
    job = oomph.Job(model, loss, optimizer, tokens, precision=precision)
    found = oomph.advise(job, gpu="t4" if precision != "fp32" else None)
    assert [one.saves for one in found.suggestions] == sorted(
        (one.saves for one in found.suggestions), reverse=True
    )
    return {one.topic: one for one in reversed(found.suggestions)}


def test_untied_embeddings_are_found_and_the_tied_model_is_rehearsed() -> None:
    found = advice()["untied embeddings"]
    assert (found.how, found.parameters) == ("rehearsed", VOCABULARY * WIDTH)
    # The peak is at the loss, where gradients are not there yet: it falls by the weight alone.
    assert found.saves == 4 * VOCABULARY * WIDTH
    assert "untied embeddings" not in advice(tied=True)


def test_a_vocabulary_that_is_most_of_the_model_is_found() -> None:
    found = advice(tied=True)["oversized embeddings"]
    assert found.parameters == VOCABULARY // 2 * WIDTH
    assert found.how == "computed"


def test_an_odd_vocabulary_is_padded_only_for_tensor_cores() -> None:
    found = advice(precision="fp16-mixed", tied=True)["vocabulary padding"]
    assert "1,024" in found.change
    assert found.parameters == -(1024 - VOCABULARY) * WIDTH
    assert found.saves < 0
    assert "vocabulary padding" not in advice(tied=True)


def test_attention_that_keeps_its_softmax_is_found() -> None:
    found = advice(fused=False)["attention without a fused kernel"]
    assert found.saves == 4 * 2 * 64 * 64 * 4  # layers, samples, pairs of tokens, bytes
    assert "attention without a fused kernel" not in advice(fused=True)


def test_shared_layers_are_rehearsed_and_the_given_model_is_left_as_it_was() -> None:
    found = advice(given=True)["layers that could share parameters"]
    assert found.how == "rehearsed"
    block = sum(parameter.numel() for parameter in Block(fused=True).parameters())
    assert found.parameters == 2 * block
    assert found.flops == pytest.approx(0, abs=1e6)


def test_nothing_is_changed() -> None:
    model = Model()
    before = [(name, parameter) for name, parameter in model.named_parameters()]
    oomph.advise(oomph.Job(model, loss, "sgd", torch.ones(2, 64, dtype=torch.long)))
    after = list(model.named_parameters())
    assert [name for name, _ in before] == [name for name, _ in after]
    assert all(one is other for (_, one), (_, other) in zip(before, after, strict=True))
    assert all(parameter.requires_grad for _, parameter in after)


def test_experts_would_save_arithmetic_and_no_memory() -> None:
    found = advice(tied=True)["dense feed-forward"]
    assert found.saves == 0
    feed_forward = 4 * 2 * 4 * WIDTH * WIDTH
    assert found.flops == pytest.approx(6 * feed_forward * 2 * 64 * 0.75)


def test_frozen_embeddings_are_rehearsed() -> None:
    found = advice(optimizer="adamw")["unfrozen embeddings"]
    assert (found.how, found.alters) == ("rehearsed", "training")
    assert found.saves > 0


def test_adapters_train_few_parameters_in_place_of_all(monkeypatch) -> None:
    monkeypatch.setattr(suggestions, "ADAPTER_RANK", 1)
    found = advice(given=True, tied=True)["all weights train"]
    adapters = 4 * (WIDTH + 3 * WIDTH + 2 * (WIDTH + 4 * WIDTH))
    assert found.parameters == -adapters
    everything = sum(parameter.numel() for parameter in Model(tied=True).parameters())
    # Without optimizer state, a gradient less for each and a weight more for each adapter.
    assert found.saves == 4 * (everything - adapters) - 4 * adapters


def test_other_optimizers_are_rehearsed() -> None:
    found = advice(optimizer="adamw")["optimizer"]
    assert (found.how, found.alters) == ("rehearsed", "training")
    assert found.saves > 0
    assert "optimizer" not in advice()


def test_an_optimizer_of_the_users_own_leaves_only_computed_numbers() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    job = oomph.Job(model, loss, optimizer, torch.ones(2, 64, dtype=torch.long))
    found = {one.topic: one for one in oomph.advise(job).suggestions}
    assert found["untied embeddings"].how == "computed"
    assert found["untied embeddings"].saves == 3 * 4 * VOCABULARY * WIDTH


def test_long_sequences_are_offered_a_window_and_eager_attention_sdpa() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        use_cache=False,
        attn_implementation="eager",
    )

    def batch():
        return {name: torch.ones(1, 2048, dtype=torch.long) for name in ("input_ids", "labels")}

    job = oomph.Job(lambda: LlamaForCausalLM(config), None, "sgd", batch)
    found = {one.topic: one for one in oomph.advise(job, gpu="h200").suggestions}
    fused = found["attention without a fused kernel"]
    assert (fused.how, fused.alters) == ("rehearsed", "nothing")
    assert fused.saves > 2 * 2 * 2048 * 2048 * 4
    assert found["full attention"].flops > 0


def test_the_flops_of_a_step_are_those_of_its_matrix_products() -> None:
    tokens = torch.ones(2, 64, dtype=torch.long)
    cost, anatomy = cost_of(oomph.Job(Model, loss, "sgd", tokens), None)
    products = sum(rows * columns for rows, columns in anatomy.linear) + VOCABULARY * WIDTH
    assert cost.flops == pytest.approx(6 * products * 2 * 64, rel=0.25)
    assert anatomy == examine(Model())


def test_micro_batches_count_as_often_as_they_come() -> None:
    tokens = torch.ones(8, 64, dtype=torch.long)
    whole, split = (
        cost_of(oomph.Job(Model, loss, "sgd", tokens, micro_batch=size), None)[0]
        for size in (None, 1)
    )
    assert split.flops == pytest.approx(whole.flops, rel=0.05)
    assert split.peak < whole.peak
