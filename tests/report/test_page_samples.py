"""Memory over time for the page: thinned out, every peak is what it was."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from recorded import random_timeline, small_estimate

from oomph.rehearsal.allocator import AllocatorSettings
from oomph.rehearsal.timeline import Block, Category, Mark, Span, Timeline
from oomph.report.history import History, history_of
from oomph.report.page import data as page_data
from oomph.report.page.data import differences, memory_data
from oomph.report.page.samples import extremes, take_samples, thin
from oomph.report.page.strips import model_blocks_of, parts_of, repeated_block

MANY = 100_000


def on_gpu(timeline: Timeline) -> History:
    return History(timeline=timeline, settings=AllocatorSettings.parse(""), overhead=1 << 29)


def on_cpu(timeline: Timeline) -> History:
    return History(timeline=timeline)


def test_samples_are_the_sums_of_what_is_alive() -> None:
    timeline = random_timeline(400)
    samples = take_samples(on_cpu(timeline))
    for event in range(0, 400, 7):
        alive = timeline.alive_at(event)
        sizes = samples.at(event)
        assert sum(sizes.values()) == sum(block.size for block in alive)
        for category in Category:
            held = sum(block.size for block in alive if block.category is category)
            assert sizes[category] == held


def test_the_peak_and_its_split_survive_thinning() -> None:
    timeline = random_timeline(MANY)
    samples = take_samples(on_cpu(timeline))
    few = thin(samples, 500)
    assert len(few.events) < 5000 < len(samples.events)
    assert few.allocated.max() == samples.allocated.max() > 1 << 40
    top = int(samples.events[samples.allocated.argmax()])
    assert few.at(top) == samples.at(top)


def test_every_stretch_keeps_its_own_peak_and_trough() -> None:
    samples = take_samples(on_gpu(random_timeline(20_000)))
    few = thin(samples, 100)
    edges = np.linspace(0, len(samples.events), 101).astype(int)
    kept = set(few.events.tolist())
    for start, stop in itertools.pairwise(edges):
        for row in (samples.allocated, samples.reserved):
            part = row[start:stop]
            inside = [
                int(row[place])
                for place in range(start, stop)
                if int(samples.events[place]) in kept
            ]
            assert max(inside) == part.max()
            assert min(inside) == part.min()


def test_each_category_keeps_its_highest() -> None:
    samples = take_samples(on_cpu(random_timeline(20_000)))
    few = thin(samples, 50)
    assert few.sizes.max(axis=1).tolist() == samples.sizes.max(axis=1).tolist()


def test_asked_for_events_stay() -> None:
    samples = take_samples(on_cpu(random_timeline(20_000)))
    assert {777, 13_131} <= set(thin(samples, 50, keep=(777, 13_131)).events.tolist())


def test_what_is_short_is_left_as_it_is() -> None:
    samples = take_samples(on_cpu(random_timeline(100)))
    assert thin(samples, 50) is samples


def test_extremes_of_fewer_values_than_stretches_are_all() -> None:
    assert extremes(np.array([3, 1, 2]), 10) == {0, 1, 2}


@pytest.mark.parametrize("gpu", ["rtx-4090", None])
def test_the_samples_peak_is_the_estimates(gpu: str | None) -> None:
    estimate = small_estimate(gpu)
    samples = take_samples(history_of(estimate))
    assert samples.allocated.max() == estimate.peak.allocated
    split = {name: size for name, size in samples.at(estimate.peak_at.event).items() if size}
    assert split == estimate.categories_at_peak


def test_reserved_is_the_estimates_too() -> None:
    estimate = small_estimate()
    samples = take_samples(history_of(estimate))
    assert samples.reserved.max() == estimate.peak.reserved


def test_differences_add_up_to_the_numbers() -> None:
    numbers = [5, 7, 7, 2]
    assert differences(numbers) == [5, 2, 0, -5]
    assert list(itertools.accumulate(differences(numbers))) == numbers


def restored(data: dict) -> list[tuple[int, int, int, str]]:
    """(birth, life, size, category) of every listed allocation."""
    table = data["allocations"]
    births = itertools.accumulate(table["birth"])
    sizes = (table["sizes"][place] for place in table["size"])
    names = (data["categories"][place] for place in table["category"])
    return list(zip(births, table["life"], sizes, names, strict=True))


def test_every_allocation_is_in_the_data() -> None:
    timeline = random_timeline(3000)
    data = memory_data(on_cpu(timeline))
    expected = [
        (b.birth, b.death - b.birth if b.death is not None else 0, b.size, str(b.category))
        for b in timeline.blocks
    ]
    assert restored(data) == expected
    assert data["allocations"]["of"] == len(timeline.blocks)


def test_of_too_many_allocations_the_largest_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_data, "MOST_BLOCKS", 20)
    timeline = random_timeline(3000)
    data = memory_data(on_cpu(timeline))
    listed = sorted(size for _, _, size, _ in restored(data))
    assert listed == sorted(block.size for block in timeline.blocks)[-20:]
    assert data["allocations"]["of"] == len(timeline.blocks)


def test_what_outlives_the_last_phase_is_kept_and_what_is_tidied_after_it_is_not_shown() -> None:
    timeline = Timeline(
        blocks=[Block(size=5, birth=0, death=3), Block(size=7, birth=1, death=2)],
        spans=[Span("step", 0, 3)],
        events=4,
    )
    data = memory_data(on_cpu(timeline))
    assert data["stop"] == 3
    assert [life for _, life, _, _ in restored(data)] == [0, 1]


def test_an_empty_timeline_has_nothing_to_draw() -> None:
    assert memory_data(on_cpu(Timeline())) == {}


def test_phases_know_their_highest_event() -> None:
    timeline = random_timeline(2000)
    samples = take_samples(on_cpu(timeline))
    for name, start, stop, top in memory_data(on_cpu(timeline))["phases"]:
        here = (samples.events >= start) & (samples.events < stop)
        assert sum(samples.at(top).values()) == samples.allocated[here].max(), name


def test_the_parts_of_a_step_are_told_by_their_ops() -> None:
    ops = ["aten.mm", "aten.mse_loss_backward", "aten.mm", "aten._foreach_sqrt", "aten.mm"]
    timeline = Timeline(
        blocks=[Block(size=1, birth=birth, op=op) for birth, op in enumerate(ops)],
        spans=[Span("step", 0, 5)],
        marks=[Mark("forward", 0, 0.0, 0)],
        events=5,
    )
    parts = [Span("forward", 0, 1), Span("backward", 1, 3), Span("optimizer", 3, 5)]
    assert parts_of(timeline) == parts
    timeline.marks = [Mark("forward", 1, 0.0, 0)]
    assert parts_of(timeline) == parts[1:]


def test_the_blocks_of_a_model_follow_each_other() -> None:
    modules = ["embed", "layers.0.up", "layers.0.down", "layers.1.up", "", "layers.1.down"]
    modules += ["head", "layers.1.down"]
    blocks = [Block(size=1, birth=birth, module=module) for birth, module in enumerate(modules)]
    pieces = model_blocks_of(Timeline(blocks=blocks, events=8))
    assert pieces == [Span("layers.0", 1, 3), Span("layers.1", 3, 6), Span("layers.1", 7, 8)]


def test_parameters_do_not_say_when_their_block_ran() -> None:
    block = Block(size=1, birth=0, module="layers.0.up", category=Category.PARAMETER)
    assert model_blocks_of(Timeline(blocks=[block], events=1)) == []


@pytest.mark.parametrize(
    ("module", "block"), [("model.layers.3.mlp.0", "model.layers.3"), ("0", "0"), ("head", "")]
)
def test_a_repeated_block_ends_at_its_number(module: str, block: str) -> None:
    assert repeated_block(module) == block
