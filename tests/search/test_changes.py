"""A plan as a diff: what differs is listed, once, with what leaving it out would change."""

from __future__ import annotations

import dataclasses

import pytest
from switched_on import on, with_on
from tiny_models import Residual, chain, llama, rows, tokens
from torch import nn

from oomph.hardware import find_gpu
from oomph.hardware.timing.clock import Clock
from oomph.jobs.job import Job
from oomph.plans.choices import KEEP, RECOMPUTE, Choices, Outside
from oomph.plans.fidelity import Fidelity
from oomph.plans.plan import Change
from oomph.rehearsal.phases import PHASES, rehearse
from oomph.rehearsal.step_cost import peak_taken, step_cost
from oomph.rehearsal.timeline import Timeline
from oomph.search import changes as module
from oomph.search.changes import describe_changes, say_blocks, settings_shown
from oomph.search.option_profiles import Marks, count_parts

H200 = find_gpu("h200")
CLOCK = Clock.of(H200)
BLOCKS = {"1": KEEP, "2": KEEP}
BEFORE = Choices(blocks=BLOCKS)
AFTER = Choices(
    precision="bf16-mixed",
    micro_batch=2,
    blocks={"1": RECOMPUTE, "2": "recompute saving product#0"},
    compiled=True,
    weights="bf16 with fp32 masters",
    techniques=on("fused_optimizer", cuda_allocator={"conf": "expandable_segments:True"}),
)


def job(samples: int = 8) -> Job:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), Residual(), Residual())

    return chain(model, batch=rows(samples), optimizer="adamw")


def whole(job: Job, choices: Choices) -> Timeline:
    return rehearse(job, H200, PHASES, choices=choices, clock=CLOCK)


def described(job: Job, before: Choices, after: Choices) -> tuple[Change, ...]:
    return describe_changes(job, H200, CLOCK, before, after, whole(job, after))


def measured(job: Job, choices: Choices) -> tuple[int, float]:
    """Peak bytes and seconds of a step, by a rehearsal of its own."""
    timeline = rehearse(
        job,
        H200,
        ("build", "step"),
        choices=choices,
        watch=Marks(tuple(choices.blocks)).watch,
        clock=CLOCK,
        skip_first_step=True,
    )
    parts = count_parts(job, choices.micro_batch)
    return peak_taken(timeline), step_cost(timeline, parts).seconds(CLOCK)


def test_nothing_changed_is_no_change() -> None:
    assert described(job(), BEFORE, BEFORE) == ()


def test_every_choice_that_differs_is_one_change() -> None:
    found = {change.technique: change for change in described(job(), BEFORE, AFTER)}
    assert {name: (one.before, one.after) for name, one in found.items()} == {
        "precision": ("fp32", "bf16-mixed"),
        "micro-batch": ("whole batch", "2 samples"),
        "recompute": ("none", "1 of 2 blocks, 1 of 2 in part"),
        "compile": ("no", "each block"),
        "fused optimizer": ("no", "yes"),
        "weights": ("own", "bf16 with fp32 masters"),
        "allocator": ("default", "expandable_segments:True"),
    }


@pytest.mark.parametrize(
    ("technique", "undone"),
    [
        ("precision", {"precision": "fp32", "weights": "own"}),
        ("micro-batch", {"micro_batch": None}),
        ("recompute", {"blocks": BLOCKS}),
        ("compile", {"compiled": False}),
        ("weights", {"weights": "own"}),
        ("allocator", {"techniques": on("fused_optimizer")}),
    ],
)
def test_a_change_is_worth_the_difference_of_two_rehearsals(
    technique: str, undone: dict[str, object]
) -> None:
    (found,) = [one for one in described(job(), BEFORE, AFTER) if one.technique == technique]
    with_it = measured(job(), AFTER)
    without = measured(job(), dataclasses.replace(AFTER, **undone))
    # The whole rehearsal keeps the losses of a part or two more.
    assert found.saves == pytest.approx(without[0] - with_it[0], abs=2048)
    assert found.costs == pytest.approx(with_it[1] - without[1], abs=1e-9)


def test_what_a_graph_keeps_for_its_replays_is_taken() -> None:
    before = dataclasses.replace(BEFORE, micro_batch=2)
    (graph,) = described(job(), before, with_on(before, "cuda_graph"))
    assert graph.technique == "CUDA graph"
    # The same kernels need the same memory, beside workspaces for products of the graph's own.
    workspaces = 72 << 20
    assert -workspaces <= graph.saves < 0


def test_parts_of_different_sizes_are_timed_alike() -> None:
    after = with_on(dataclasses.replace(BEFORE, micro_batch=3), "fused_optimizer")
    (parts, fused) = described(job(10), BEFORE, after)
    assert parts.costs == pytest.approx(
        measured(job(10), after)[1]
        - measured(job(10), dataclasses.replace(after, micro_batch=None))[1]
    )
    # A fused optimizer launches once a step, so that it is never worth a micro-batch.
    part = measured(job(10), after)[1] / 4
    assert abs(fused.costs) < part


def test_a_loss_in_chunks_and_steps_in_backward_save_memory() -> None:
    model = llama(layers=2, vocabulary=8192, batch=tokens(2, 64))
    blocks = {f"model.layers.{at}": KEEP for at in range(2)}
    before = Choices(blocks=blocks)
    after = Choices(blocks=blocks, head="lm_head", loss_chunk=32, optimizer_in_backward=True)
    found = {change.technique: change for change in described(model, before, after)}
    assert set(found) == {"loss", "optimizer in backward"}
    assert found["loss"].after == "32 rows at a time"
    assert found["loss"].saves > 0
    assert found["optimizer in backward"].saves > 0


def test_how_true_a_change_is_depends_on_what_it_does() -> None:
    def fidelities(after: Choices) -> dict[str, Fidelity]:
        return {change.technique: change.fidelity for change in described(job(), BEFORE, after)}

    exact = with_on(dataclasses.replace(BEFORE, micro_batch=2), "fused_optimizer")
    assert set(fidelities(exact).values()) == {Fidelity.EXACT}
    lossy = dataclasses.replace(BEFORE, techniques=on("low_bit_state"))
    assert fidelities(lossy) == {"optimizer state": Fidelity.LOSSY}


@pytest.mark.parametrize(
    ("precision", "fidelity"),
    [
        ("fp32", Fidelity.EXACT),
        ("tf32", Fidelity.EXACT),
        ("bf16", Fidelity.ROUNDING),
        ("bf16-mixed", Fidelity.ROUNDING),
        ("fp16-mixed", Fidelity.ROUNDING),
    ],
)
def test_fused_kernels_round_where_numbers_are_short(precision: str, fidelity: Fidelity) -> None:
    (compiled,) = [
        one
        for one in module._differences(Choices(precision=precision))
        if one.technique == "compile"
    ]
    assert compiled.fidelity is fidelity


def test_pricing_rehearses_once_for_each_change_and_the_allocator_for_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timeline = whole(job(), AFTER)
    calls = []

    def counted(*args: object, **options: object) -> Timeline:
        calls.append(options)
        return timeline

    monkeypatch.setattr(module, "rehearse", counted)
    found = describe_changes(job(), H200, CLOCK, BEFORE, AFTER, timeline)
    assert len(calls) == len(found) - 1


@pytest.mark.parametrize("where", ["host", "disk"])
def test_where_blocks_are_offloaded_to_is_said_and_goes_with_them(where: Outside) -> None:
    blocks = {"1": "recompute, offloaded", "2": RECOMPUTE}
    after = Choices(blocks=blocks, offloaded_to=where)
    (change,) = described(job(), BEFORE, after)
    assert change.after == f"2 of 2 blocks, what 1 of 2 save is on the {where}"
    assert settings_shown("recompute", Choices()) == {"blocks": {}, "offloaded_to": "host"}


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ({}, "no blocks"),
        ({"a": KEEP, "b": KEEP}, "none"),
        ({"a": KEEP, "b": RECOMPUTE}, "1 of 2 blocks"),
        ({"a": KEEP, "b": "recompute saving product#0"}, "1 of 2 in part"),
        ({"a": RECOMPUTE, "b": "recompute saving product#0"}, "1 of 2 blocks, 1 of 2 in part"),
    ],
)
def test_blocks_are_said_in_words(blocks: dict[str, str], words: str) -> None:
    assert say_blocks(Choices(blocks=blocks)) == words
