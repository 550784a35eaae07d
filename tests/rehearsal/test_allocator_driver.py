"""Addresses as the driver was seen to hand them out."""

from oomph.rehearsal.allocator.driver import CHUNK, DriverAddresses
from oomph.units import MIB


def test_each_new_chunk_lies_right_below_the_last() -> None:
    driver = DriverAddresses()
    first, second = driver.take(32 * MIB), driver.take(64 * MIB)
    assert first - second == 64 * MIB


def test_what_a_segment_leaves_of_its_chunk_serves_the_next_that_fits() -> None:
    driver = DriverAddresses()
    first = driver.take(44 * MIB)
    assert driver.take(16 * MIB) == first + 44 * MIB


def test_the_lowest_of_several_holes_is_used_first() -> None:
    driver = DriverAddresses()
    driver.take(44 * MIB)
    lower = driver.take(44 * MIB)
    assert driver.take(16 * MIB) == lower + 44 * MIB


def test_ranges_given_back_join_and_are_used_again() -> None:
    driver = DriverAddresses()
    first = driver.take(CHUNK)
    second = driver.take(CHUNK)
    third = driver.take(CHUNK)
    driver.give_back(first, CHUNK)
    driver.give_back(third, CHUNK)
    driver.give_back(second, CHUNK)
    assert driver.take(3 * CHUNK) == third


def test_reserved_ranges_are_aligned_and_never_meet_the_others() -> None:
    driver = DriverAddresses()
    size = 20 * MIB
    one, other = driver.reserve(size), driver.reserve(size)
    assert one % size == 0
    assert other == one + size
    assert driver.take(MIB) < one
