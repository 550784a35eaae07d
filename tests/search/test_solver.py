"""The fastest choice under a limit fits to the byte, and trying every choice finds no better."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from oomph.search import solver
from oomph.search.solver import Chain, ChainBlock, Option, leanest, peak, solve

MIB = 1 << 20
BIG = 10**12


def option(saved: int, forward: int, backward: int, seconds: float) -> Option:
    return Option(name="", saved=saved, forward=forward, backward=backward, seconds=seconds)


def block(*options: Option, forward_base: int = 0, backward_base: int = 0) -> ChainBlock:
    return ChainBlock(
        name="", options=options, forward_base=forward_base, backward_base=backward_base
    )


def chain(*blocks: ChainBlock, loss_base: int = 0, floor: int = 0) -> Chain:
    return Chain(blocks=blocks, loss_base=loss_base, floor=floor)


def transformer_menu(rng: random.Random, options: int) -> tuple[Option, ...]:
    """Recompute all, keep all, and recompute parts: whatever saves more is mostly faster."""
    whole = 512 * rng.randrange(800_000, 2_400_000)
    menu = []
    for kept in [0.0, 1.0, *(rng.random() for _ in range(options - 2))]:
        saved = 16 * MIB + 512 * int(whole * kept / 512)
        backward = int(whole * (1.1 + rng.random())) + 32 * MIB
        seconds = 0.01 + 0.0033 * (1 - kept) ** 1.3 + 1e-4 * rng.random()
        menu.append(option(saved, whole // 2 + saved // 3, backward, seconds))
    return tuple(menu)


def transformer(rng: random.Random, blocks: int, options: int, classes: int) -> Chain:
    """Blocks of some classes in turn; gradients grow in backward, the loss has its own peak."""
    menus = [transformer_menu(rng, options) for _ in range(classes)]
    weights = 200 * MIB
    states = 3 * blocks * weights
    return chain(
        *(
            block(
                *menus[k % classes],
                forward_base=states,
                backward_base=states + (blocks - k) * weights,
            )
            for k in range(blocks)
        ),
        loss_base=states + rng.choice([0, 1, 4]) * 1024 * MIB,
        floor=states + blocks * weights // 2,
    )


def alike(rng: random.Random, blocks: int, options: int) -> Chain:
    return transformer(rng, blocks, options, 1)


def two_classes(rng: random.Random, blocks: int, options: int) -> Chain:
    return transformer(rng, blocks, options, 2)


def all_different(rng: random.Random, blocks: int, options: int) -> Chain:
    return transformer(rng, blocks, options, blocks)


def anything(rng: random.Random, blocks: int, options: int) -> Chain:
    """No order in any number; some options free memory that was there before them."""
    size = 10 ** rng.randrange(1, 13)

    def one_block() -> ChainBlock:
        menu = []
        for _ in range(options):
            saved = rng.randrange(-size // 4, size)
            forward, backward = (max(saved, 0) + rng.randrange(size) for _ in range(2))
            menu.append(option(saved, forward, backward, rng.random()))
        bases = [rng.randrange(3 * size) for _ in range(2)]
        return block(*menu, forward_base=bases[0], backward_base=bases[1])

    every = [one_block() for _ in range(blocks)]
    return chain(*every, loss_base=rng.randrange(3 * size), floor=rng.randrange(3 * size))


KINDS = [alike, two_classes, all_different, anything]
MakeChain = Callable[[random.Random, int, int], Chain]
#: Blocks and options of chains whose every choice can be tried in a millisecond or two.
SMALL = [(1, 8), (2, 8), (3, 8), (4, 6), (5, 4), (6, 4), (7, 3), (8, 2), (10, 2), (12, 2)]


def every_choice(chain: Chain) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The peak and the seconds of all choices there are."""
    saved, seconds = np.zeros(1, np.int64), np.zeros(1)
    worst = np.full(1, chain.floor)
    for one in chain.blocks:
        numbers = [(each.saved, each.forward, each.backward) for each in one.options]
        adds, forward, backward = np.array(numbers, np.int64).T
        at_forward = one.forward_base + np.add.outer(saved, forward)
        at_backward = one.backward_base + np.add.outer(saved, backward)
        worst = np.maximum(worst[:, None], np.maximum(at_forward, at_backward)).ravel()
        saved = np.add.outer(saved, adds).ravel()
        seconds = np.add.outer(seconds, [each.seconds for each in one.options]).ravel()
    return np.maximum(worst, chain.loss_base + saved), seconds


def some_limit(rng: random.Random, peaks: NDArray[np.int64]) -> int:
    """A limit where it matters: at a choice's peak, a byte below one, or anywhere in between."""
    least, some = int(peaks.min()), int(rng.choice(peaks))
    return rng.choice([least - 1, least, some, some - 1, rng.randint(least, int(peaks.max()))])


def check(
    chain: Chain, limit: int, peaks: NDArray[np.int64], seconds: NDArray[np.float64], gap: float = 0
) -> None:
    """What `solve` returns is what trying every choice finds."""
    solution = solve(chain, limit)
    fits = peaks <= limit
    if not fits.any():
        assert solution is None
        return
    assert solution is not None
    best = seconds[fits].min()
    chosen = [one.options[place] for one, place in zip(chain.blocks, solution.choice, strict=True)]
    assert peak(chain, solution.choice) == solution.peak <= limit
    assert solution.seconds == pytest.approx(sum(each.seconds for each in chosen), rel=1e-12)
    assert solution.seconds == pytest.approx(best, rel=1e-9)
    assert solution.bound <= best * (1 + 1e-12)
    assert 0 <= solution.gap <= gap


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_small_chains_are_solved_as_by_trying_every_choice(kind: MakeChain) -> None:
    rng = random.Random(kind.__name__)
    for _ in range(1000 // len(KINDS)):
        chain = kind(rng, *rng.choice(SMALL))
        peaks, seconds = every_choice(chain)
        check(chain, some_limit(rng, peaks), peaks, seconds)


@pytest.mark.parametrize("kind", KINDS)
def test_so_are_twelve_blocks_of_three_options(kind: MakeChain) -> None:
    rng = random.Random(kind.__name__)
    chain = kind(rng, 12, 3)
    peaks, seconds = every_choice(chain)
    for _ in range(5):
        check(chain, some_limit(rng, peaks), peaks, seconds)


@pytest.mark.parametrize("kind", KINDS)
def test_the_program_alone_finds_the_same(kind: MakeChain, monkeypatch) -> None:
    monkeypatch.setattr(solver, "MOST_VARIANTS", 0)
    rng = random.Random(kind.__name__)
    for _ in range(50):
        chain = kind(rng, *rng.choice(SMALL))
        peaks, seconds = every_choice(chain)
        # A byte below a faster choice's peak, its bound is that choice: it cannot tell the two.
        check(chain, some_limit(rng, peaks), peaks, seconds, gap=1)


def test_up_to_twelve_blocks_the_program_tells_choices_a_millionth_apart(monkeypatch) -> None:
    monkeypatch.setattr(solver, "MOST_VARIANTS", 0)
    rng = random.Random(12)
    for _ in range(10):
        menus = [
            [option(rng.randrange(100), 0, 0, 1 + 1e-6 * rng.random()) for _ in range(3)]
            for _ in range(7)
        ]
        chain = Chain(blocks=tuple(block(*menu) for menu in menus), loss_base=0, floor=0)
        peaks, seconds = every_choice(chain)
        check(chain, int(np.median(peaks)), peaks, seconds, gap=1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_leanest_choice_has_the_smallest_peak_and_nothing_fits_below_it(kind) -> None:
    rng = random.Random(kind.__name__)
    for _ in range(100):
        chain = kind(rng, *rng.choice(SMALL))
        peaks, _ = every_choice(chain)
        lean = leanest(chain)
        assert peak(chain, lean.choice) == lean.peak == peaks.min()
        at_peak = solve(chain, lean.peak)
        assert at_peak is not None
        assert lean.bound <= at_peak.seconds <= lean.seconds
        assert solve(chain, lean.peak - 1) is None


small = st.integers(-2, 5)
small_options = st.builds(option, small, small, small, st.integers(0, 3).map(float))
small_blocks = st.builds(
    lambda menu, forward, backward: block(*menu, forward_base=forward, backward_base=backward),
    st.lists(small_options, min_size=1, max_size=4),
    small,
    small,
)
small_chains = st.builds(
    lambda blocks, loss, floor: chain(*blocks, loss_base=loss, floor=floor),
    st.lists(small_blocks, max_size=5),
    small,
    small,
)


@given(chain=small_chains)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_where_many_choices_are_equal_every_limit_is_solved(chain: Chain) -> None:
    peaks, seconds = every_choice(chain)
    for limit in range(int(peaks.min()) - 1, int(peaks.max()) + 2):
        check(chain, limit, peaks, seconds)


@given(chain=small_chains)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_so_it_is_by_the_program_alone(chain: Chain) -> None:
    peaks, seconds = every_choice(chain)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(solver, "MOST_VARIANTS", 0)
        for limit in range(int(peaks.min()), int(peaks.max()) + 1):
            check(chain, limit, peaks, seconds, gap=1)


FIRST = block(option(10, 30, 40, 2.0), option(20, 25, 60, 1.0), forward_base=100, backward_base=200)
SECOND = block(option(-5, 7, 9, 1.0), option(50, 60, 70, 0.5), forward_base=300, backward_base=100)


@pytest.mark.parametrize(
    ("choice", "loss_base", "floor", "largest"),
    [
        ((0, 0), 0, 0, 300 + 10 + 7),
        ((1, 1), 0, 0, 300 + 20 + 60),
        ((1, 1), 320, 0, 320 + 20 + 50),
        ((1, 0), 320, 0, 320 + 20 - 5),
        ((1, 1), 320, 400, 400),
    ],
)
def test_the_peak_is_the_largest_moment(choice, loss_base: int, floor: int, largest: int) -> None:
    assert peak(chain(FIRST, SECOND, loss_base=loss_base, floor=floor), choice) == largest


def test_a_blocks_backward_counts_what_earlier_blocks_saved_but_not_its_own_twice() -> None:
    backward_heavy = block(option(5, 5, 900, 1.0))
    assert peak(chain(FIRST, backward_heavy), (1, 0)) == 20 + 900


def test_the_peak_wants_one_option_for_every_block() -> None:
    with pytest.raises(ValueError, match="zip"):
        peak(chain(FIRST, SECOND), (0,))


def test_a_chain_without_blocks_fits_where_its_fixed_moments_do() -> None:
    empty = chain(loss_base=7, floor=9)
    solution = solve(empty, 9)
    assert solution is not None
    assert (solution.choice, solution.seconds, solution.gap, solution.peak) == ((), 0.0, 0.0, 9)
    assert solve(empty, 8) is None


def test_what_no_choice_changes_can_be_what_does_not_fit() -> None:
    fits_but_for_the_floor = chain(FIRST, SECOND, floor=BIG)
    assert solve(fits_but_for_the_floor, BIG - 1) is None
    solution = solve(fits_but_for_the_floor, BIG)
    assert solution is not None
    assert solution.choice == (1, 1)


def test_a_block_that_frees_memory_lets_a_later_one_keep_its_own() -> None:
    frees = block(option(0, 0, 0, 1.0), option(-30, 0, 0, 2.0))
    keeps = block(option(50, 50, 50, 1.0), option(0, 0, 0, 9.0))
    freed, not_freed = solve(chain(frees, keeps), 20), solve(chain(frees, keeps), 50)
    assert freed is not None and not_freed is not None
    assert freed.choice == (1, 0)
    assert not_freed.choice == (0, 0)


@pytest.mark.parametrize(
    ("kind", "by_program"),
    [*((kind, False) for kind in KINDS), (all_different, True), (anything, True)],
)
def test_more_memory_is_never_slower(kind: MakeChain, by_program: bool, monkeypatch) -> None:
    if by_program:
        monkeypatch.setattr(solver, "MOST_VARIANTS", 0)
    rng = random.Random(kind.__name__)
    chain = kind(rng, 20, 4)
    fastest = [min(range(4), key=lambda k: one.options[k].seconds) for one in chain.blocks]
    low, high = leanest(chain).peak, peak(chain, fastest)
    limits = [low + (high - low) * share // 6 for share in range(7)]
    solutions = [solve(chain, limit) for limit in limits]
    for less, more in itertools.pairwise(solutions):
        assert less is not None and more is not None
        # Each may be this far from the best for its limit.
        assert more.bound <= less.seconds
        assert more.seconds <= less.seconds * (1 + 2 * solver.GAP)
    assert solutions[-1] is not None
    assert solutions[-1].choice == tuple(fastest)


@pytest.mark.parametrize("kind", [alike, two_classes])
def test_eighty_blocks_of_a_network_are_solved_exactly(kind: MakeChain) -> None:
    chain = kind(random.Random(80), 80, 8)
    low = leanest(chain).peak
    limit = low + 20 * 1024 * MIB
    solution = solve(chain, limit)
    assert solution is not None
    assert low < solution.peak <= limit
    assert solution.gap == 0.0
    assert len(set(solution.choice)) > 1


def test_eighty_different_blocks_have_the_same_solution_by_sweep_and_program(monkeypatch) -> None:
    chain = all_different(random.Random(80), 80, 8)
    limit = leanest(chain).peak + 20 * 1024 * MIB
    swept = solve(chain, limit)
    monkeypatch.setattr(solver, "MOST_VARIANTS", 0)
    programmed = solve(chain, limit, seconds_limit=20)
    assert swept is not None and programmed is not None
    assert swept.gap == 0.0
    assert programmed.peak <= limit
    assert programmed.bound <= swept.seconds <= programmed.seconds
    assert programmed.gap <= solver.GAP


def test_the_programs_bound_holds_where_it_stops_short_of_the_best(monkeypatch) -> None:
    rng = random.Random(30)
    monkeypatch.setattr(solver, "GAP", 0.02)
    for _ in range(5):
        chain = all_different(rng, 30, 8)
        limit = leanest(chain).peak + 8 * 1024 * MIB
        best = solve(chain, limit)
        with monkeypatch.context() as patched:
            patched.setattr(solver, "MOST_VARIANTS", 0)
            programmed = solve(chain, limit)
        assert best is not None and programmed is not None
        assert best.seconds * 0.98 <= programmed.bound <= best.seconds <= programmed.seconds
        assert programmed.gap <= 0.02


def test_a_terabyte_less_one_byte_is_too_little(monkeypatch) -> None:
    monkeypatch.setattr(solver, "MOST_VARIANTS", 0)
    keep, drop = option(BIG // 4, 0, 0, 1.0), option(0, 0, 0, 2.0)
    four = chain(*[block(keep, drop)] * 4)
    fits, short = solve(four, BIG), solve(four, BIG - 1)
    assert fits is not None and short is not None
    assert (fits.seconds, fits.peak) == (4.0, BIG)
    assert (short.seconds, short.peak) == (5.0, BIG // 4 * 3)
    # Numbers of 16 digits cannot prove that the byte matters.
    assert short.bound == pytest.approx(4.0)


def test_bytes_taken_for_nothing_cost_no_more_than_a_few_bytes(monkeypatch) -> None:
    """The limit is what the optimizer needs, so that nothing may be fitted below it."""
    monkeypatch.setattr(solver, "MOST_VARIANTS", 0)
    keep, drop = option(BIG // 4, 0, 0, 1.0), option(0, 0, 0, 2.0)
    four = chain(*[block(keep, drop)] * 4, floor=BIG - 1)
    solution = solve(four, BIG - 1)
    assert solution is not None
    assert solution.seconds == 5.0


def test_out_of_time_the_choice_is_the_leanest_and_says_how_far_it_may_be_off(monkeypatch) -> None:
    monkeypatch.setattr(solver, "MOST_VARIANTS", 0)
    chain = all_different(random.Random(80), 80, 8)
    lean = leanest(chain)
    limit = lean.peak + 20 * 1024 * MIB
    hurried = solve(chain, limit, seconds_limit=0.0)
    monkeypatch.undo()
    best = solve(chain, limit)
    assert hurried is not None and best is not None
    assert hurried.choice == lean.choice
    all_fastest = sum(min(each.seconds for each in menu) for menu in chain.menus)
    assert all_fastest * (1 - 1e-12) <= hurried.bound <= best.seconds < hurried.seconds
    assert hurried.gap == pytest.approx(1 - hurried.bound / hurried.seconds)


def test_a_menu_has_options_and_their_seconds_are_numbers() -> None:
    with pytest.raises(AssertionError, match="no option"):
        block()
    for seconds in (float("nan"), float("inf"), -1.0):
        with pytest.raises(AssertionError):
            option(0, 0, 0, seconds)
