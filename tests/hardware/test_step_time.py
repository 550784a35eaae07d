"""What the card takes and what its host takes are told apart; the longer of them counts most."""

from __future__ import annotations

import dataclasses

import pytest
from switched_on import on

from oomph.hardware.timing.step_time import StepTime, ratio
from oomph.plans.choices import KEEP, RECOMPUTE, Choices
from oomph.search.measured_times import RealClock, setting_of
from oomph.search.option_profiles import OptionProfiles
from oomph.search.solver import Chain, ChainBlock, Option, solve

#: Recomputing takes more of both.
MENU = (
    Option(name=KEEP, saved=8, forward=8, backward=8, seconds=2.0, launching=1.0),
    Option(name=RECOMPUTE, saved=1, forward=8, backward=8, seconds=3.0, launching=1.5),
)


def profiles(launch: float = 1.0, **how: object) -> OptionProfiles:
    """Two blocks whose launches take so many times as long as those of `MENU`."""
    options = tuple(dataclasses.replace(one, launching=one.launching * launch) for one in MENU)
    blocks = tuple(
        ChainBlock(name=name, options=options, forward_base=0, backward_base=0) for name in "ab"
    )
    return OptionProfiles(
        choices=Choices(**how),  # type: ignore[arg-type]
        chain=Chain(blocks=blocks, loss_base=0, floor=0),
        parts=2,
        others=StepTime(1.0, 0.5 * launch),
        step=StepTime(0.25, 1.0 * launch),
        loss_is_chunked=False,
        fixed_part=0,
    )


def test_a_step_takes_longer_than_the_longer_one_most_where_they_are_alike() -> None:
    assert StepTime(4.0).seconds == StepTime(0.0, 4.0).seconds == pytest.approx(4)
    more = [
        StepTime(4.0, launching).seconds - max(4.0, launching) for launching in (1, 3, 4, 5, 16)
    ]
    assert 0 < more[0] < more[1] < more[2] > more[3] > more[4] > 0
    assert more[2] == pytest.approx(0.19 * 4, rel=0.01)
    assert StepTime(4.0, 2.0).seconds < 1.02 * 4


def test_a_step_takes_what_takes_longer_over_all_of_it() -> None:
    # 2 × (2 + 2 + 1) + 0.25 of kernels, 2 × (1 + 1 + 0.5) + 1 of launches.
    assert profiles().fastest == StepTime(10.25, 6).seconds
    assert not profiles().waits_for_launches and not profiles().waits
    assert profiles(launch=2).fastest == StepTime(10.25, 12).seconds
    assert profiles(launch=2).waits_for_launches and profiles(launch=2).waits


def test_where_the_card_waits_the_solver_can_go_by_the_hosts_seconds() -> None:
    slow_to_keep = dataclasses.replace(MENU[0], launching=9.0)
    waiting = profiles()
    chain = waiting.chain.with_options(lambda _, one: slow_to_keep if one.name == KEEP else one)
    waiting = dataclasses.replace(waiting, chain=chain)
    by_kernels, by_host = solve(waiting.priced(0.0), 100), solve(waiting.launched, 100)
    assert by_kernels is not None and by_host is not None
    assert set(waiting.choose(by_kernels).blocks.values()) == {KEEP}
    assert set(waiting.choose(by_host).blocks.values()) == {RECOMPUTE}
    assert waiting.seconds(by_host) < waiting.seconds(by_kernels)


def test_ratios_are_of_each_by_itself_and_need_something_to_tell_them() -> None:
    assert ratio([]) == StepTime(1.0, 1.0)
    assert ratio(
        [(StepTime(3.0, 8.0), StepTime(2.0, 4.0)), (StepTime(9.0), StepTime(0.0))]
    ) == StepTime(1.5, 2.0)


def test_real_seconds_of_kernels_and_launches_take_the_place_of_the_clocks() -> None:
    answer = profiles()
    times = {(block, KEEP): StepTime(4.0, 3.0) for block in "ab"}
    timed = answer.timed(times)
    # What was not timed is taken for twice and three times as long, too.
    assert timed.chain.blocks[0].options[1].step_time == StepTime(6.0, 4.5)
    assert timed.others == StepTime(2.0, 1.5) and timed.step == StepTime(0.5, 3.0)


def test_a_graph_is_launched_as_one_whatever_was_timed() -> None:
    graph = profiles(launch=0.0, techniques=on("cuda_graph"))
    both = dataclasses.replace(profiles(), graphed=graph)
    timed = both.timed({(block, KEEP): StepTime(2.5, 50.0) for block in "ab"})
    assert timed.fastest > 200 and timed.graphed is not None
    assert timed.graphed.fastest == pytest.approx(1.25 * graph.fastest)


class Timer:
    """Says that blocks take twice of the card and thrice of the host."""

    def time(self, _: Choices, menus: dict[str, list[str]]) -> dict[tuple[str, str], StepTime]:
        answer = {one.name: one.step_time for one in MENU}
        return {
            (p, how): answer[how].scaled(StepTime(2, 3))
            for p, menu in menus.items()
            for how in menu
        }


@dataclasses.dataclass
class Blocks:
    """As a survey has them."""

    path: str
    kind: str = "Block"


@dataclasses.dataclass
class Found:
    blocks: tuple[Blocks, ...] = (Blocks("a"), Blocks("b"))


def test_steps_inside_backward_are_added_to_what_was_timed_without_them() -> None:
    plain = profiles()
    real = RealClock(timer=Timer())  # type: ignore[arg-type]
    real.time(plain.choices, plain, Found())  # type: ignore[arg-type]
    assert real.knows(plain.choices) and setting_of(plain.choices) == (None, "own")
    inside = dataclasses.replace(
        plain,
        choices=Choices(optimizer_in_backward=True),
        chain=plain.chain.with_options(
            lambda _, one: dataclasses.replace(
                one, seconds=one.seconds + 0.5, launching=one.launching + 7.0
            )
        ),
    )
    keep = real.correct(plain, 8).chain.blocks[0].options[0]
    assert keep.step_time == StepTime(4.0, 3.0)
    keep = real.correct(inside, 8).chain.blocks[0].options[0]
    assert keep.step_time == StepTime(4.5, 10.0)


def test_parts_of_another_size_are_taken_for_slower_by_as_much() -> None:
    plain = profiles()
    real = RealClock(timer=Timer())  # type: ignore[arg-type]
    real.time(plain.choices, plain, Found())  # type: ignore[arg-type]
    half = dataclasses.replace(
        profiles(launch=1.5, micro_batch=4),
        chain=profiles(launch=1.5).chain.with_options(
            lambda _, one: dataclasses.replace(one, seconds=one.seconds / 2)
        ),
    )
    keep = real.correct(half, 8).chain.blocks[0].options[0]
    assert keep.step_time == StepTime(2.0, 4.5)
