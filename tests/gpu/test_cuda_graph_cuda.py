"""Micro-batches captured as CUDA graphs, on a real card: the same losses, the predicted memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from switched_on import on

from oomph.engine.applying import apply_choices
from oomph.engine.step import train_step
from oomph.jobs.job import build_model, make_batch, make_optimizer
from oomph.jobs.sources import job_from_name
from oomph.plans.choices import Choices

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def losses(cuda_graph: bool, compiled: bool) -> list[float]:
    job = job_from_name("gpt2", batch=8, seq=128, precision="bf16-mixed", optimizer="adamw-fused")
    torch.manual_seed(0)
    model = build_model(job).to("cuda")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.02)
    make: Any = make_optimizer("adamw-fused")
    optimizer = make(model.parameters())
    batch = {name: leaf.to("cuda") for name, leaf in make_batch(job).items()}
    choices = Choices(
        precision="bf16-mixed",
        micro_batch=2,
        blocks={f"transformer.h.{at}": "keep" for at in range(12)},
        compiled=compiled,
        techniques=on(cuda_graph={"enabled": cuda_graph}),
    )
    stage, undo = apply_choices(
        choices, dataclasses.replace(job, batch=batch), model, optimizer, device_type="cuda"
    )
    torch.manual_seed(1)
    found = [float(train_step(stage, batch)) for _ in range(5)]
    if cuda_graph:
        assert stage.graph is not None and stage.graph._captured is not None
    undo()
    return found


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_losses_are_those_of_plain_micro_batches(compiled: bool) -> None:
    plain, graphed = losses(False, compiled), losses(True, compiled)
    assert plain == pytest.approx(graphed, rel=2e-3)
