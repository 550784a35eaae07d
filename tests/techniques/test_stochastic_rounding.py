"""Stochastic rounding is right in the mean and leaves what bf16 can say alone."""

from __future__ import annotations

import pytest
import torch

from oomph.techniques.stochastic_rounding import round_stochastically


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("value", [1.001, -1.001, 1.0039, 3.14159e-20, -12345.678, 1e-40])
def test_the_mean_of_many_draws_is_the_value(value: float, generator: torch.Generator) -> None:
    exact = torch.tensor(value)
    rounded = round_stochastically(exact.repeat(100_000), generator).double()
    low, high = rounded.min(), rounded.max()
    step = high - low
    assert low < exact < high, "both neighbours are drawn"
    assert set(rounded.tolist()) == {low.item(), high.item()}
    # Four standard deviations of the mean, at most.
    assert abs(rounded.mean() - exact.double()) < 4 * 0.5 * step / 100_000**0.5


def test_what_bf16_can_represent_stays(generator: torch.Generator) -> None:
    bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    every = bits.view(torch.bfloat16)
    numbers = every[~every.isnan()]
    assert torch.equal(round_stochastically(numbers.float(), generator), numbers)


def test_nan_stays_nan_and_infinity_infinity(generator: torch.Generator) -> None:
    # What a GPU calls NaN has all its lower bits set, and so has its negative.
    nan = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert nan.isnan().all()
    for _ in range(20):
        assert round_stochastically(nan, generator).isnan().all()
    infinite = torch.tensor([torch.inf, -torch.inf])
    assert torch.equal(round_stochastically(infinite, generator).float(), infinite)


def test_small_updates_add_up_where_rounding_to_the_nearest_loses_them(
    generator: torch.Generator,
) -> None:
    nearest = weights = torch.ones(10_000, dtype=torch.bfloat16)
    for _ in range(100):
        nearest = (nearest.float() + 1e-4).bfloat16()
        weights = round_stochastically(weights.float() + 1e-4, generator)
    assert (nearest == 1).all()
    assert weights.float().mean().item() == pytest.approx(1.01, abs=2e-4)


def test_only_the_given_generator_is_drawn_from(generator: torch.Generator) -> None:
    before = torch.get_rng_state()
    first = round_stochastically(torch.rand(64, generator=generator), generator.manual_seed(1))
    assert torch.equal(torch.get_rng_state(), before)
    values = torch.rand(64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(round_stochastically(values, generator.manual_seed(1)), first)
