"""Accelerate under a plan makes the optimizer steps of the plain loop."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from ragged_text import BLOCKS, Ragged, assert_plain, assert_same_weights, tiny_llama
from switched_on import on
from torch import Tensor, nn
from torch.utils.data import DataLoader

from oomph.errors import BadInput, DoesNotFit
from oomph.integrations import framework_plan
from oomph.integrations.accelerate import PartsLoader, prepare

BATCH = 8


@pytest.fixture(autouse=True)
def no_state_from_other_tests() -> None:
    """Accelerators of one process share their settings."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Loop:
    """A training loop as Accelerate's users write it."""

    def __init__(self, *, planned: bool, steps: int = 1, model: Any = None, **options: Any) -> None:
        given = options.pop("accelerator", {})
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, **given)
        model = model or tiny_llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        loader = DataLoader(Ragged(), BATCH)
        things = (model, optimizer, loader, scheduler)
        if planned:
            settings = {"budget": "64MiB", "say": lambda _: None, **options}
            prepared = prepare(self.accelerator, *things, **settings)
        else:
            prepared = self.accelerator.prepare(*things)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        self.steps = 0

    def train(self, *, accumulate: bool = True, loss: Any = None) -> Loop:
        around = self.accelerator.accumulate if accumulate else contextlib.nullcontext
        for _ in range(2):
            for batch in self.loader:
                with around(self.model):
                    found = loss(self.model, batch) if loss else self.model(**batch).loss
                    self.accelerator.backward(found)
                    self.steps += self.accelerator.sync_gradients
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
        return self


LEAN = {
    "micro_batch": 3,
    "blocks": dict.fromkeys(BLOCKS, "recompute"),
    "head": "lm_head",
    "loss_chunk": 7,
    "techniques": on("fused_optimizer"),
}


def assert_same_loops(plain: Loop, planned: Loop, tolerance: float = 1e-4) -> None:
    assert plain.steps == planned.steps
    assert plain.scheduler.get_last_lr() == planned.scheduler.get_last_lr()
    assert_same_weights(planned.model, plain.model, tolerance)


def test_a_plan_is_found_within_the_budget_and_steps_as_the_plain_loop_does(said: Any) -> None:
    plain = Loop(planned=False).train()
    planned = Loop(planned=True, budget="3MiB", say=said)
    assert planned.loader.plan.choices.micro_batch is not None
    assert said[0].startswith("LlamaForCausalLM in 3.00 MiB on the CPU")
    assert_same_loops(plain, planned.train())


@pytest.mark.parametrize("steps", [1, 2])
def test_parts_of_a_batch_add_up_to_it(give: Any, steps: int) -> None:
    give(**LEAN)
    plain = Loop(planned=False, steps=steps).train()
    planned = Loop(planned=True, steps=steps).train()
    assert plain.steps == 6 // steps + (steps == 2)
    assert_same_loops(plain, planned)


def test_a_loop_that_does_not_accumulate_steps_once_for_each_batch(give: Any) -> None:
    give(**LEAN)
    plain = Loop(planned=False).train(accumulate=False)
    assert_same_loops(plain, Loop(planned=True).train(accumulate=False))


def test_bf16_stays_accelerates_own(give: Any) -> None:
    give(**LEAN)
    settings = {"accelerator": {"mixed_precision": "bf16"}}
    plain = Loop(planned=False, **settings).train()
    assert_same_loops(plain, Loop(planned=True, **settings).train(), tolerance=2e-2)


def squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A mean over samples."""
    return model(batch["input_ids"]).logits.square().mean()


def test_a_loss_of_the_loops_own_is_weighed_by_samples(give: Any) -> None:
    give(**LEAN)
    plain = Loop(planned=False).train(loss=squares)
    assert_same_loops(plain, Loop(planned=True, loss=squares).train(loss=squares))


def averaged(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A mean over labels."""
    logits = model(batch["input_ids"]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def test_a_loss_that_samples_do_not_count_alike_in_is_refused_unless_items_are_counted(
    give: Any,
) -> None:
    give(micro_batch=3)
    uneven = Ragged()
    uneven.labels[0, :9] = 1
    batch = {"input_ids": uneven.tokens[:BATCH], "labels": uneven.labels[:BATCH]}

    def labels(batch: Any) -> Tensor:
        return (batch["labels"] != -100).sum()

    refused = Loop(planned=True, loss=averaged)
    with pytest.raises(BadInput, match="items=lambda batch"):
        refused.loader._try_out(batch)
    counted = Loop(planned=True, loss=averaged, items=labels)
    counted.loader._try_out(batch)
    plain = Loop(planned=False).train(loss=averaged)
    assert_same_loops(plain, Loop(planned=True, loss=averaged, items=labels).train(loss=averaged))


def masked(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Divides by what a mask counts, which may be alike in all samples of a first batch."""
    mask = (batch["labels"] != -100).float()
    each = (model(batch["input_ids"]).logits.mean(-1) - batch["input_ids"]).square()
    return (each * mask).sum() / mask.sum()


def summed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A sum over samples."""
    return model(batch["input_ids"]).logits.square().sum() / 1e4


def test_what_a_loss_counts_is_read_from_its_graph(give: Any) -> None:
    give(micro_batch=3)
    full = Ragged()
    batch = {"input_ids": full.tokens[:BATCH], "labels": full.tokens[:BATCH]}  # alike in all
    with pytest.raises(BadInput, match=r"divides by what it counts.*items=lambda batch"):
        Loop(planned=True, loss=masked).loader._try_out(batch)
    plain = Loop(planned=False).train(loss=summed)
    assert_same_loops(plain, Loop(planned=True, loss=summed).train(loss=summed))


def test_taking_back_makes_everything_plain(give: Any) -> None:
    give(**LEAN)
    loop = Loop(planned=True, steps=2)
    assert isinstance(loop.loader, PartsLoader)
    assert len(loop.loader) == 3
    assert [len(part["labels"]) for part in loop.loader] == [3, 3, 2, 3, 3, 2, 3, 2]
    loop.loader.take_back()
    loop.loader.take_back()
    assert loop.accelerator.gradient_accumulation_steps == 2
    assert "backward" not in vars(loop.accelerator)
    assert_plain(loop.model)
    assert [len(batch["labels"]) for batch in loop.loader] == [8, 8, 5]
    assert not loop.optimizer.param_groups[0]["fused"]


def test_memory_is_there_to_be_logged(give: Any, some_plan: Any) -> None:
    give(**LEAN)
    expected = some_plan.predicted.peak.allocated / 2**30
    assert Loop(planned=True).loader.memory() == {"peak_gib_predicted": expected}


def test_without_a_plan_training_goes_on_only_if_that_was_said(
    monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise DoesNotFit("no plan fits", 1)

    monkeypatch.setattr(framework_plan, "plan_and_split", refuse)
    with pytest.raises(DoesNotFit):
        Loop(planned=True)
    plain = Loop(planned=False).train()
    unplanned = Loop(planned=True, unplanned=True, say=said)
    assert said == ["training goes on without a plan: no plan fits"]
    assert_same_loops(plain, unplanned.train())


def test_a_loader_that_cannot_be_looked_into_needs_a_batch(said: Any) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    things = accelerator, model, optimizer, iter([])
    with pytest.raises(BadInput, match="batch="):
        prepare(*things, budget="1MiB")
    prepare(*things, budget="1MiB", unplanned=True, say=said)
    assert said[0].startswith("training goes on without a plan: looking at the loader's")


class Clipping(Loop):
    """Clips after each backward, as loops do that do not accumulate."""

    def train_clipped(self, clip: str, most: float) -> Clipping:
        for batch in self.loader:
            self.accelerator.backward(self.model(**batch).loss)
            getattr(self.accelerator, clip)(self.model.parameters(), most)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return self


@pytest.mark.parametrize(("clip", "most"), [("clip_grad_norm_", 0.05), ("clip_grad_value_", 1e-4)])
def test_gradients_are_clipped_when_those_of_all_parts_are_there(
    give: Any, monkeypatch: pytest.MonkeyPatch, clip: str, most: float
) -> None:
    give(**LEAN)
    monkeypatch.setattr(torch.optim, "AdamW", lambda weights, lr: torch.optim.SGD(weights, 1.0))
    plain = Clipping(planned=False).train_clipped(clip, most)
    planned = Clipping(planned=True).train_clipped(clip, most)
    assert_same_loops(plain, planned)
    planned.loader.take_back()
    assert clip not in vars(planned.accelerator)


class ByHand(Loop):
    """Does something with gradients or the optimizer after each backward, by hand."""

    def train_by_hand(self, do: Any, *, backward: Any = None) -> ByHand:
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                (backward or self.accelerator.backward)(loss)
                do(self)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return self


def doubled(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(2).add_(1e-3)


def normalized(loop: Loop) -> None:
    found = [p.grad for p in loop.model.parameters() if p.grad is not None]
    norms = torch.stack([one.norm() for one in found]).norm()
    for one in found:
        one.div_(norms + 1e-6)


HANDS = {
    "norm": lambda loop: nn.utils.clip_grad_norm_(loop.model.parameters(), 0.05),
    "value": lambda loop: nn.utils.clip_grad_value_(loop.model.parameters(), 1e-4),
    "doubled": doubled,
    "normalized": normalized,
}


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("hand", HANDS)
def test_what_a_loop_does_with_gradients_by_hand_it_does_with_those_of_the_batch(
    give: Any, monkeypatch: pytest.MonkeyPatch, hand: str, steps: int
) -> None:
    give(**LEAN)
    monkeypatch.setattr(torch.optim, "AdamW", lambda weights, lr: torch.optim.SGD(weights, 1.0))
    plain = ByHand(planned=False, steps=steps).train_by_hand(HANDS[hand])
    assert_same_loops(plain, ByHand(planned=True, steps=steps).train_by_hand(HANDS[hand]))


def test_gradients_that_a_loop_zeroes_by_hand_are_those_of_the_batch_before(
    give: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(**LEAN)
    monkeypatch.setattr(torch.optim, "AdamW", lambda weights, lr: torch.optim.SGD(weights, 1.0))

    def trained(planned: bool) -> Loop:
        loop = Loop(planned=planned)
        for batch in loop.loader:
            loop.model.zero_grad()
            loop.accelerator.backward(loop.model(**batch).loss)
            loop.optimizer.step()
            loop.scheduler.step()
        return loop

    assert_same_loops(trained(planned=False), trained(planned=True))


def test_no_gradient_is_shown_before_all_parts_have_gone_backward(give: Any) -> None:
    give(**LEAN)
    loop, seen = ByHand(planned=True), []

    def look(loop: Loop) -> None:
        shown = any(p.grad is not None and p.grad.any() for p in loop.model.parameters())
        seen.append((shown, loop.accelerator.sync_gradients))

    loop.train_by_hand(look)
    assert len(seen) > len(loop.loader) and all(shown == last for shown, last in seen)


def written(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        parameter.grad = torch.ones_like(parameter)


def scheduled(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize(
    ("do", "why"),
    [(written, "made or wrote gradients for a part"), (scheduled, "changed the learning rate")],
)
def test_what_a_loop_does_once_for_each_part_is_refused(give: Any, do: Any, why: str) -> None:
    give(**LEAN)
    loop = ByHand(planned=True)
    before = [p.detach().clone() for p in loop.model.parameters()]
    with pytest.raises(BadInput, match=why):
        loop.train_by_hand(do)
    assert all(map(torch.equal, before, loop.model.parameters()))


def test_a_backward_that_is_not_the_accelerators_is_refused(give: Any) -> None:
    give(**LEAN)
    with pytest.raises(BadInput, match=r"another way than with accelerator\.backward"):
        ByHand(planned=True).train_by_hand(lambda loop: None, backward=lambda loss: loss.backward())


def test_a_part_that_is_left_out_is_refused_and_whole_batches_are_not(give: Any) -> None:
    give(**LEAN)
    loop = Loop(planned=True)
    with pytest.raises(BadInput, match="for some parts of a batch and not for others"):
        for at, batch in enumerate(loop.loader):
            if at != 1:
                loop.accelerator.backward(loop.model(**batch).loss)
    with torch.no_grad():
        assert sum(len(batch["input_ids"]) for batch in loop.loader) == len(Ragged())
