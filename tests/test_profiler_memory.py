"""The demo's measure is right: known tensor programs have the peak that arithmetic says."""

from __future__ import annotations

import torch

from benchmarks.profiler_memory import cpu_memory_changes, measure_cpu_peak


def test_the_peak_counts_what_is_alive_at_once() -> None:
    def program() -> torch.Tensor:
        first = torch.empty(1000, dtype=torch.uint8)
        second = torch.empty(500, dtype=torch.uint8)
        del first
        third = torch.empty(800, dtype=torch.uint8)
        del second
        return third

    assert cpu_memory_changes(program) == [1000, 500, -1000, 800, -500]
    assert measure_cpu_peak(program) == 1500


def test_what_existed_before_is_the_baseline() -> None:
    held = [torch.empty(10_000, dtype=torch.uint8)]

    def program() -> None:
        held.append(torch.empty(300, dtype=torch.uint8))

    assert measure_cpu_peak(program) == 300


def test_a_program_without_tensors_needs_nothing() -> None:
    assert measure_cpu_peak(lambda: sum(range(10))) == 0


def test_backward_is_measured_too() -> None:
    weight = torch.ones(1000, 1000, requires_grad=True)
    peak = measure_cpu_peak(lambda: (weight * weight).sum().backward())
    # A gradient for each of the two factors, the loss, and the gradient of the loss.
    assert peak == 2 * 4_000_000 + 4 + 4
