"""A model that is planned for and trained where it is: on the card. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import oomph
from oomph.hardware import find_gpu
from oomph.runs.run import enforce
from oomph.units import GIB

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WORDS = 256


def test_a_model_and_a_batch_on_the_card_are_planned_for_and_trained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(WORDS, (4, 32), device="cuda")
    batch = {"input_ids": tokens, "labels": tokens}
    with oomph.fit(model, optimizer, None, batch, precision="bf16-mixed", time_blocks=True) as run:
        losses = [float(run.step(batch)) for _ in range(5)]
    said = f"{run.plan.choices}\n{caplog.text}"
    assert [str(event) for event in run.events] == [], said
    # Each step on the same batch makes it more likely.
    assert losses == sorted(losses, reverse=True), f"{losses} under {said}"
    assert losses[-1] < 0.95 * losses[0], f"{losses} under {said}"


def test_a_budget_is_enforced_on_a_card_without_a_number() -> None:
    card = find_gpu(torch.cuda.get_device_name())
    try:
        enforce(8 * GIB, card, torch.device("cuda"))
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(8 * GIB, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
