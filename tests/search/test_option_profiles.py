"""What an audition hears adds up: its chain predicts the rehearsal of any choice for the blocks."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from switched_on import with_on
from tiny_models import Residual, albert, bert, chain, gpt2, llama, resnet, rows, t5, tokens
from torch import Tensor, nn

from oomph.hardware import GPU, find_gpu
from oomph.hardware.timing.clock import Clock
from oomph.jobs.job import Job, make_batch
from oomph.plans.choices import KEEP, RECOMPUTE, Choices
from oomph.rehearsal.allocator import AllocatorSettings
from oomph.rehearsal.phases import rehearse
from oomph.rehearsal.replaying import replay
from oomph.rehearsal.step_cost import StepCost, peak_allocated, step_cost
from oomph.rehearsal.timeline import Timeline
from oomph.search import solver
from oomph.search.option_profiles import (
    MOST_ROUNDS,
    OptionProfiles,
    count_parts,
    profile_options,
    with_even_parts,
)
from oomph.search.survey import Survey, survey

H200 = find_gpu("h200")
MIB = 1 << 20
MIXED = Choices(precision="bf16-mixed")
COMPILED = dataclasses.replace(MIXED, compiled=True)


def look(job: Job, gpu: GPU | None) -> Survey:
    return survey(job, gpu, Clock.of(gpu), lambda *_: None)


def hear(job: Job, gpu: GPU | None = None, base: Choices | None = None) -> OptionProfiles:
    found = look(job, gpu)
    base = base or Choices()
    if "generation_cache" not in found.unsuited:
        base = with_on(base, generation_cache={"dropped": True})
    if base.compiled:
        base = dataclasses.replace(base, compiled_others=found.others)
    return profile_options(job, gpu, Clock.of(gpu), found, base)


def rehearsed(job: Job, gpu: GPU | None, choices: Choices) -> Timeline:
    """The step that counts, with all its parts, after a first one."""
    return rehearse(job, gpu, ("build", "first step", "step"), choices=choices, clock=Clock.of(gpu))


def glimpsed(job: Job, gpu: GPU | None, choices: Choices) -> Timeline:
    """The same without a first step and with two parts at most."""
    return rehearse(
        job, gpu, ("build", "step"), choices=choices, clock=Clock.of(gpu), skip_first_step=True
    )


def some_choices(chain: solver.Chain) -> list[tuple[int, ...]]:
    """Everything kept, and something between that and nothing."""
    draw = random.Random(len(chain.blocks))
    mixed = tuple(draw.randrange(1, len(menu)) for menu in chain.menus)
    return [(0,) * len(chain.blocks), mixed]


def errors(job: Job, gpu: GPU | None, base: Choices) -> list[tuple[int, int]]:
    """How far above the rehearsed peak the chain's is, and that peak, for some choices."""
    profiles = hear(job, gpu, base)
    assert profiles.chain.blocks
    found = []
    for choice in some_choices(profiles.chain):
        solution = solver._solution(profiles.chain, choice, bound=0.0)
        timeline = glimpsed(job, gpu, profiles.choose(solution))
        peak = peak_allocated(timeline)
        found.append((solver.peak(profiles.chain, choice) - peak, peak))
        if profiles.parts == 1:
            seconds = step_cost(timeline, 1).seconds(Clock.of(gpu))
            assert profiles.seconds(solution) == pytest.approx(seconds, rel=0.002)
    return found


@pytest.mark.parametrize(
    ("job", "gpu", "base"),
    [
        (
            functools.partial(llama, 3),
            H200,
            dataclasses.replace(COMPILED, micro_batch=1, weights="bf16 with fp32 masters"),
        ),
        (
            functools.partial(llama, 3),
            H200,
            dataclasses.replace(COMPILED, optimizer_in_backward=True),
        ),
        (functools.partial(bert, 2), H200, with_on(MIXED, cast_cache={"dropped": True})),
        (functools.partial(gpt2, 3), H200, COMPILED),
        (t5, H200, COMPILED),
        (albert, None, Choices()),
    ],
    ids=[
        "llama compiled, in micro-batches",
        "llama compiled, stepping in backward",
        "bert without a cast cache",
        "gpt2 compiled",
        "t5 compiled",
        "albert on the cpu",
    ],
)
def test_a_chain_predicts_the_peak_of_every_choice(
    job: Callable[[], Job], gpu: GPU | None, base: Choices
) -> None:
    for error, peak in errors(job(), gpu, base):
        # Some choices need another workspace, of 1 MiB, which is much beside so small a model.
        assert -0.001 * peak < error < 0.01 * peak + MIB


def test_autocasts_copies_of_weights_are_never_forgotten() -> None:
    # They are there until backward begins, whether a block keeps its own or not: the chain counts
    # them to the end. Here they are a large part of everything.
    for error, peak in errors(llama(layers=3, batch=tokens(1, 8)), H200, MIXED):
        assert -0.001 * peak < error < 0.05 * peak


def test_convolutions_are_predicted_from_above() -> None:
    for error, peak in errors(resnet(), H200, Choices()):
        assert -0.001 * peak < error < 0.05 * peak


def test_peaks_are_those_of_the_replayed_step() -> None:
    timeline = rehearsed(llama(), H200, Choices())
    replayed = replay(timeline, AllocatorSettings.parse(""))
    assert peak_allocated(timeline) == replayed.phases["step"].allocated


def test_the_peak_is_that_of_the_last_step_alone() -> None:
    # Without a first step the optimizer makes its state with all gradients at once.
    choices = Choices(optimizer_in_backward=True)
    job = llama(batch=tokens(1, 4))
    short, long = glimpsed(job, None, choices), rehearsed(job, None, choices)
    assert peak_allocated(short) == peak_allocated(long)


# -- micro-batches --------------------------------------------------------------------------------


def test_parts_are_counted_as_a_step_makes_them() -> None:
    job = llama(batch=tokens(5))
    assert [count_parts(job, size) for size in (None, 5, 3, 2, 1)] == [1, 1, 2, 3, 5]


def test_a_smaller_last_part_is_filled_up() -> None:
    job = llama(batch=tokens(5))
    assert make_batch(with_even_parts(job, 3))["input_ids"].shape == (6, 32)
    assert with_even_parts(job, 1) is job
    assert with_even_parts(job, None) is job


def test_what_is_not_per_sample_stays_as_it_is_when_a_part_is_filled_up() -> None:
    shared = torch.ones(7, 2)
    job = chain(Residual, batch=lambda: (torch.ones(5, 16), torch.zeros(5, 16), shared, "text"))
    first, _, other, text = make_batch(with_even_parts(job, 2))
    assert first.shape == (6, 16)
    assert other is shared and text == "text"


def test_a_tensor_that_is_as_long_as_the_batch_by_chance_is_not_filled_up() -> None:
    weights = torch.ones(5)
    job = chain(Residual, batch=lambda: (torch.ones(5, 16), torch.zeros(5, 16), weights))
    named = dataclasses.replace(job, sample_tensors=("[0]", "[1]"))
    first, _, other = make_batch(with_even_parts(named, 2))
    assert first.shape == (6, 16)
    assert other is weights


def test_a_smaller_last_part_does_not_hide_what_the_others_take() -> None:
    job = chain(lambda: nn.Sequential(Residual(), Residual()), batch=rows(500))
    profiles = hear(job, None, Choices(micro_batch=200))
    solution = solved(profiles, KEEP)
    assert profiles.parts == 3
    assert solution.peak >= peak_allocated(rehearsed(job, None, profiles.choose(solution)))


def test_a_step_of_many_parts_is_timed_by_the_few_that_were_rehearsed() -> None:
    choices = Choices(micro_batch=1)

    def cost(parts: int) -> StepCost:
        job = chain(lambda: nn.Sequential(Residual(), Residual()), batch=rows(parts))
        return step_cost(rehearsed(job, H200, choices), parts)

    two, three, twelve = cost(2), cost(3), cost(12)
    each = three.launches - two.launches
    assert twelve.launches == three.launches + 9 * each
    assert twelve.kernels == pytest.approx(three.kernels + 9 * (three.kernels - two.kernels))


def test_a_quick_look_times_parts_as_a_long_one_does() -> None:
    job = chain(lambda: nn.Sequential(nn.Linear(16, 16), Residual(), Residual()), batch=rows(8))
    profiles = hear(job, H200, Choices(micro_batch=1))
    solution, clock = solved(profiles, KEEP), Clock.of(H200)
    whole = step_cost(rehearsed(job, H200, profiles.choose(solution)), 8).seconds(clock)
    # All parts are taken to add to gradients, although the first one makes them.
    gradients = 10 * clock.launch
    assert profiles.seconds(solution) == pytest.approx(whole + gradients)


def solved(profiles: OptionProfiles, how: str) -> solver.Solution:
    """All blocks with one option."""
    choice = [
        [option.name for option in block.options].index(how) for block in profiles.chain.blocks
    ]
    return solver._solution(profiles.chain, choice, bound=0.0)


# -- what is heard --------------------------------------------------------------------------------


def test_a_kind_with_few_blocks_tries_out_the_first_of_its_options() -> None:
    job = resnet()
    found = look(job, None)
    profiles = profile_options(job, None, Clock.of(None), found, Choices())
    members = Counter(block.kind for block in found.blocks)
    for block, heard_block in zip(found.blocks, profiles.chain.blocks, strict=True):
        assert heard_block.name == block.path
        menu = found.options(block)[: MOST_ROUNDS * members[block.kind]]
        assert tuple(option.name for option in heard_block.options) == menu


def test_recomputing_saves_less_and_takes_longer() -> None:
    for block in hear(llama(), H200).chain.blocks:
        options = {option.name: option for option in block.options}
        keep, recompute, *between = (options.pop(KEEP), options.pop(RECOMPUTE), *options.values())
        assert recompute.saved < keep.saved
        assert recompute.seconds > keep.seconds
        assert all(recompute.saved < option.saved <= keep.saved for option in between)
        assert all(keep.seconds <= option.seconds < recompute.seconds for option in between)


def test_choosing_names_every_blocks_option() -> None:
    profiles = hear(llama(layers=2))
    solution = solver._solution(profiles.chain, (1, 0), bound=0.0)
    chosen = profiles.choose(solution)
    assert chosen.blocks == {"model.layers.0": RECOMPUTE, "model.layers.1": KEEP}
    assert dataclasses.replace(chosen, blocks={}) == profiles.choices


def test_without_blocks_there_is_one_moment() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))

    job = chain(model, batch=rows(64))
    profiles = hear(job)
    timeline = rehearsed(job, None, Choices())
    assert profiles.chain.blocks == ()
    assert solver.peak(profiles.chain, ()) == peak_allocated(timeline)
    assert profiles.fastest == pytest.approx(step_cost(timeline, 1).seconds(Clock.of(None)))


class Summed(nn.Module):
    """A model with a wide head whose logits are looked at twice."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.twice = twice
        self.blocks = nn.Sequential(Residual(), Residual())
        self.head = nn.Linear(16, 5000, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.blocks(x))
        loss = nn.functional.cross_entropy(logits, labels)
        return loss + logits.pow(2).mean() if self.twice else loss


@pytest.mark.parametrize("twice", [False, True])
def test_it_is_heard_whether_the_loss_can_be_chunked(twice: bool) -> None:
    def batch() -> dict[str, Any]:
        return {"x": torch.ones(8, 16), "labels": torch.ones(8, dtype=torch.long)}

    job = Job(lambda: Summed(twice), None, "sgd", batch)
    profiles = hear(job, None, Choices(head="head", loss_chunk=4))
    # A loss that is computed in chunks beside logits that are whole saves nothing, and is right.
    assert profiles.loss_is_chunked
    logits = 8 * 5000 * 4
    lean = hear(Job(lambda: Summed(False), None, "sgd", batch), None, profiles.choices)
    assert (profiles.chain.loss_base - lean.chain.loss_base >= logits) is twice


def test_other_chunks_of_the_loss_follow_from_the_one_heard() -> None:
    profiles = hear(llama(layers=2, vocabulary=5000), None, Choices(head="lm_head", loss_chunk=32))
    assert profiles.loss_is_chunked
    other = profiles.with_loss(64, 1000, 0.5)
    assert other.choices == dataclasses.replace(profiles.choices, loss_chunk=64)
    assert other.chain.loss_base == profiles.chain.loss_base + 1000
    assert other.others.kernels == profiles.others.kernels + 0.5
    assert profiles.with_loss(64, 0, -100.0).others.kernels == 0.0
