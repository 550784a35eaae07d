"""A model that its owner compiled or had checkpoint: plans choose instead, and give it back."""

from __future__ import annotations

import dataclasses
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import transformers as hf
from switched_on import on
from torch import Tensor, nn

from oomph.hardware import find_gpu
from oomph.jobs.job import Job
from oomph.jobs.preexisting_settings import checkpoints_itself, put_aside, uncompiled
from oomph.plans.choices import Choices
from oomph.rehearsal.estimation import estimate
from oomph.runs.run import apply, fit
from oomph.search.planner import plan

LENGTH, VOCABULARY = 32, 128


def llama() -> Any:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=VOCABULARY,
    )
    return hf.LlamaForCausalLM(config)


def checkpointing(**how: Any) -> Any:
    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how or None)
    return model


def tokens() -> dict[str, Tensor]:
    ids = torch.arange(4 * LENGTH).view(4, LENGTH) % VOCABULARY
    return {"input_ids": ids, "labels": ids.clone()}


def test_what_is_put_aside_comes_back() -> None:
    model = checkpointing()
    model.model.layers[0].compile()
    compiled = model.model.layers[0]._compiled_call_impl
    assert checkpoints_itself(model)
    undo = put_aside(model)
    assert not checkpoints_itself(model)
    assert not model.is_gradient_checkpointing
    assert model.model.layers[0]._compiled_call_impl is None
    undo()
    assert model.is_gradient_checkpointing
    assert model.model.layers[0]._compiled_call_impl is compiled


def test_a_model_without_any_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    before = dict(vars(model[0]))
    put_aside(model)()
    assert vars(model[0]) == before
    assert not checkpoints_itself(model)
    assert uncompiled(model) is model


@pytest.mark.parametrize("how", [{}, {"use_reentrant": True}, {"use_reentrant": False}])
def test_a_plan_recomputes_what_it_chooses_alone(how: dict[str, Any]) -> None:
    job = Job(lambda: checkpointing(**how), batch=tokens)
    made = plan(job, budget="8GiB", gpu="h200")
    assert set(made.choices.blocks.values()) == {"keep"}
    assert made.choices.compiled
    (change,) = [one for one in made.changes if one.technique == "recompute"]
    assert (change.before, change.after) == ("3 of 3 blocks", "none")


def test_a_run_computes_each_block_as_often_as_its_plan_says() -> None:
    calls: SimpleQueue[int] = SimpleQueue()  # a list would be put back after a recomputation
    model = checkpointing()
    attend = model.model.layers[0].self_attn.forward
    model.model.layers[0].self_attn.forward = lambda *a, **k: (calls.put(1), attend(*a, **k))[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = Job(model, None, optimizer, tokens())
    made = plan(job, budget="1TiB")
    for how, often in (("keep", 1), ("recompute", 2)):
        blocks = {f"model.layers.{at}": how for at in range(3)}
        choices = Choices(blocks=blocks, techniques=on(generation_cache={"dropped": True}))
        run = apply(dataclasses.replace(made, choices=choices), job)
        before = calls.qsize()
        run.step(tokens())
        assert calls.qsize() - before == often
        run.undo()
        assert model.is_gradient_checkpointing


def test_an_estimate_is_of_the_job_as_it_is() -> None:
    ids = torch.ones(16, 256, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    plain = estimate(Job(llama, batch=batch), gpu=find_gpu("h200"))
    leaner = estimate(Job(checkpointing, batch=batch), gpu=find_gpu("h200"))
    assert leaner.peak.allocated < plain.peak.allocated


def test_one_that_was_compiled_as_a_whole_counts_as_what_is_inside() -> None:
    model = llama()
    compiled = torch.compile(model)
    assert Job(compiled, batch=tokens()).model is model
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    run = fit(compiled, optimizer, None, tokens(), budget="1TiB")
    before = model.lm_head.weight.clone()
    run.step(tokens())
    assert not torch.equal(model.lm_head.weight, before)
    run.undo()
    built = Job(lambda: torch.compile(llama()), batch=tokens)
    assert plan(built, budget="8GiB", gpu="h200").choices.compiled
