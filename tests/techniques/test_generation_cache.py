"""Models that keep keys and values for generating, as they come from the hub, and training them."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from switched_on import on
from torch import Tensor, nn

from oomph.hardware import find_gpu
from oomph.hardware.timing.clock import Clock
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.rehearsal.estimation import estimate
from oomph.runs.run import Run, apply
from oomph.search.planner import plan
from oomph.search.survey import Survey, survey
from oomph.techniques.generation_cache import (
    BESIDE_A_CACHE,
    caching_modules,
    evaluating_the_loss,
    without_cache,
)

H200 = find_gpu("h200")
LENGTH, VOCABULARY = 32, 128
SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}


def llama() -> nn.Module:
    config = hf.LlamaConfig(**SMALL, intermediate_size=64, vocab_size=VOCABULARY)
    return hf.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = hf.GPT2Config(
        n_embd=32, n_layer=3, n_head=4, vocab_size=VOCABULARY, n_positions=LENGTH, **drops
    )
    return hf.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    config = hf.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        vocab_size=VOCABULARY,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


def mamba() -> nn.Module:
    return hf.MambaForCausalLM(
        hf.MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=VOCABULARY, state_size=4)
    )


def bert() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**SMALL, intermediate_size=64, vocab_size=VOCABULARY))


class Wrapped(nn.Module):
    """Somebody's own module around one of transformers'."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()

    def forward(self, **batch: Tensor) -> Any:
        return self.inner(**batch)


def tokens(samples: int = 4, length: int = LENGTH) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCABULARY, (samples, length), generator=draw)
    return {"input_ids": ids, "labels": ids.clone()}


def look(build: Callable[[], nn.Module], batch: Any = None, loss: Any = None) -> Survey:
    job = Job(build, loss, batch=tokens() if batch is None else batch)
    return survey(job, H200, Clock.of(H200), lambda *_: None)


@pytest.fixture
def told() -> Any:
    """A model that keeps nothing in training."""
    model = llama().train()
    (module,) = caching_modules(model)
    undo = without_cache(module)
    yield model
    undo()
    assert model(**tokens()).past_key_values is not None
    assert "forward" not in vars(model)


def test_in_training_nothing_is_kept(told: nn.Module) -> None:
    assert told(**tokens()).past_key_values is None
    assert told.config.use_cache  # which is saved with the model


def test_outside_of_training_all_is_as_ever(told: nn.Module) -> None:
    told.eval()
    assert told(**tokens()).past_key_values is not None
    with evaluating_the_loss():
        assert told(**tokens()).past_key_values is None
    assert told(**tokens()).past_key_values is not None


def test_whoever_asks_for_it_gets_it(told: nn.Module) -> None:
    kept = told(**tokens(), use_cache=True).past_key_values
    assert kept.get_seq_length() == LENGTH
    more = told(**tokens(length=4), past_key_values=kept).past_key_values
    assert more.get_seq_length() == LENGTH + 4
    ids = tokens()["input_ids"]
    for asked in (True, None):  # by its place, which no keyword may take as well
        assert told(ids, None, None, None, None, None, asked).past_key_values is not None


def test_the_outermost_module_that_can_be_told_is() -> None:
    model = Wrapped()
    assert list(caching_modules(model)) == [model.inner]
    assert not list(caching_modules(nn.Sequential(nn.Linear(2, 2))))


def can_drop(found: Survey) -> bool:
    return "generation_cache" not in found.unsuited


@pytest.mark.parametrize("build", [llama, gpt2, t5, Wrapped])
def test_a_survey_finds_out_who_keeps_something(build: Callable[[], nn.Module]) -> None:
    found = look(build)
    assert can_drop(found)
    assert BESIDE_A_CACHE not in found.left_alone


def test_so_it_does_where_outputs_are_tuples() -> None:
    assert can_drop(look(llama, loss=lambda model, batch: model(**batch, return_dict=False)[0]))


def test_who_keeps_nothing_is_left_alone() -> None:
    assert not can_drop(look(bert))
    assert not can_drop(look(mamba))  # by itself, in training

    def told_by_its_owner() -> nn.Module:
        model = llama()
        model.config.use_cache = False
        return model

    assert not can_drop(look(told_by_its_owner))


def test_rows_of_several_samples_keep_it() -> None:
    # Without it transformers would keep the samples apart, which the untouched job does not.
    positions = (torch.arange(LENGTH) % 8).expand(4, LENGTH)
    found = look(llama, {**tokens(), "position_ids": positions})
    assert not can_drop(found)
    assert BESIDE_A_CACHE in found.left_alone


def test_a_loss_that_reads_it_keeps_it() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        output = model(**batch)
        keys: Tensor = output.past_key_values.layers[0].keys
        return output.loss + keys.square().mean()

    found = look(llama, loss=loss)
    assert not can_drop(found)
    assert BESIDE_A_CACHE in found.left_alone


def test_a_plan_drops_it_and_says_so() -> None:
    samples = 256
    job = Job(llama, None, "adamw", functools.partial(tokens, samples))
    need = estimate(job, gpu=H200).smallest_budget
    made = plan(job, budget=need - (40 << 20), gpu=H200)
    assert "generation_cache" in made.choices.techniques
    assert made.choices.compiled
    assert made.choices.recomputed
    assert not made.notes
    (change,) = [one for one in made.changes if one.technique == "keys and values"]
    assert (change.before, change.after) == ("kept for generating", "not kept")
    # Priced alone: backward needs the same keys and values, kept or not.
    assert change.saves == 0
    recompute = next(one for one in made.changes if one.technique == "recompute")
    assert recompute.saves > 0


# What is kept is a copy of another layout, for which the CPU has attention of T5 in other kernels.
@pytest.mark.parametrize(
    ("build", "apart"), [(llama, 0), (gpt2, 0), (t5, 1e-5), (mamba, 0), (Wrapped, 0)]
)
def test_blocks_run_twice_with_the_same_numbers(
    build: Callable[[], nn.Module], apart: float
) -> None:
    torch.manual_seed(0)
    plain = build().train()
    model = copy.deepcopy(plain)
    batch = tokens()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        loss = plain(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    run = applied(build, model, batch)
    assert [run.step(batch).item() for _ in range(3)] == pytest.approx(losses, rel=apart, abs=0)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=apart, atol=apart)
    with torch.no_grad():
        expected = plain.eval()(**batch).loss.item()
    assert run.evaluate([batch]).loss == pytest.approx(expected, rel=1e-6)
    run.undo()
    output = model.train()(**batch)
    assert any(hasattr(output, name) for name in ("past_key_values", "cache_params"))


def applied(build: Callable[[], nn.Module], model: nn.Module, batch: Any) -> Run:
    """All blocks recomputed, and nothing kept for generating, on the CPU."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    blocks = {block.path: "recompute" for block in look(build).blocks}
    assert blocks
    job = Job(model, None, optimizer, batch)
    made = plan(job, budget=1 << 40)
    choices = Choices(blocks=blocks, techniques=on(generation_cache={"dropped": True}))
    return apply(dataclasses.replace(made, choices=choices), job)
