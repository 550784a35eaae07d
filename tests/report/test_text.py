"""What an estimate looks like: the answer first, 80 columns, no colour where none is wanted."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
from rich.console import Console

import oomph
from oomph.rehearsal.estimation import Estimate, Interval
from oomph.rehearsal.timeline import Category
from oomph.report import report as report_module
from oomph.report.html import render_html
from oomph.report.report import describe, format_range, smallest_gpus
from oomph.report.text import print_estimate, render_text
from oomph.units import GIB, MIB, format_bytes


@pytest.fixture(scope="module")
def small() -> Estimate:
    """gpt2 on an RTX 4090, where it fits."""
    return oomph.estimate(oomph.job_from_name("gpt2", batch=1, seq=64), gpu="rtx-4090")


@pytest.fixture(scope="module")
def on_cpu() -> Estimate:
    job = oomph.job_from_name("gpt2", batch=1, seq=64)
    return oomph.estimate(job, phases=("build", "eval"))


@pytest.fixture
def too_large(small) -> Estimate:
    return dataclasses.replace(
        small, verdict="does_not_fit", budget=2 * GIB, smallest_budget=100 * GIB
    )


def test_the_first_line_is_the_answer(small) -> None:
    first = render_text(small).splitlines()[0]
    assert first.startswith(f"fits: gpt2 needs {format_bytes(small.peak.device)} (")
    low, high = small.interval["device"].low, small.interval["device"].high
    assert f"({format_range(low, high)} predicted) of rtx-4090's 23.51 GiB; at the peak" in first
    largest, size = next(iter(small.categories_at_peak.items()))
    assert largest in first
    assert format_bytes(size) in first


def test_str_is_the_text_report(small) -> None:
    assert str(small) == render_text(small)


def test_all_three_ledgers_are_shown_for_every_phase(small) -> None:
    text = render_text(small)
    for name, ledgers in small.phases.items():
        sizes = (ledgers.allocated, ledgers.reserved, ledgers.device)
        row = r"\s+".join(re.escape(part) for part in (name, *map(format_bytes, sizes)))
        assert re.search(rf"^  {row}$", text, re.MULTILINE)


def test_categories_and_modules_at_the_peak_are_shown(small) -> None:
    text = render_text(small)
    for category, size in small.categories_at_peak.items():
        row = rf"^  {category}\s+{re.escape(format_bytes(size))}\s+<?\d+ %"
        assert re.search(row, text, re.MULTILINE)
    assert list(small.modules_at_peak)[1] in text


def test_every_category_has_words() -> None:
    assert set(report_module._CATEGORIES) == {str(category) for category in Category}


def test_assumptions_and_reasons_are_shown_where_there_are_any(small) -> None:
    assert all(reason in render_text(small) for reason in small.interval_reasons)
    assert "Notes" not in render_text(dataclasses.replace(small, notes=()))
    noted = render_text(dataclasses.replace(small, notes=("all masks are assumed full",)))
    assert "Notes\n  all masks are assumed full" in noted


def test_all_but_the_answer_fits_80_columns(small, too_large) -> None:
    long_name = dataclasses.replace(small, modules_at_peak={"layer." * 30: GIB})
    for estimate in (small, long_name):
        _, *rest = render_text(estimate).splitlines()
        assert max(map(len, rest)) <= 80
    assert render_text(too_large).splitlines()[0].startswith("does not fit: gpt2 needs ")


def test_a_job_that_does_not_fit_is_told_what_would(too_large) -> None:
    lines = render_text(too_large).splitlines()
    assert "of a budget of 2.00 GiB on rtx-4090;" in lines[0]
    assert lines[1] == "The smallest budget it would run in: 100.0 GiB (predicted)."
    assert lines[2] == "The smallest GPUs that would hold it: h200 (139.8 GiB), b200 (178.3 GiB)."


def test_a_job_no_card_holds_is_told_so(too_large) -> None:
    giant = dataclasses.replace(too_large, smallest_budget=1000 * GIB)
    assert "No single GPU of the catalogue would hold it." in render_text(giant)


def test_a_fitting_job_gets_no_advice_unless_it_fits_by_cleaning_up(small) -> None:
    assert describe(small).advice == ()
    (advice,) = describe(dataclasses.replace(small, allocator_retries=3)).advice
    assert "gives cached blocks back 3 times" in advice


def test_inconclusive_names_the_range(small) -> None:
    interval = {**small.interval, "device": Interval(low=3 * GIB, high=5 * GIB)}
    unsure = dataclasses.replace(
        small, verdict="inconclusive", budget=4 * GIB, smallest_budget=5 * GIB, interval=interval
    )
    assert describe(unsure).verdict == "inconclusive"
    assert "3.00–5.00 GiB predicted" in describe(unsure).advice[0]


def test_a_card_is_only_replaced_by_one_of_the_same_maker() -> None:
    assert [gpu.name for gpu in smallest_gpus(180 * GIB, "mi250x")] == ["mi300x"]
    assert smallest_gpus(180 * GIB, "h200") == []
    smallest = smallest_gpus(1, "t4")
    assert len(smallest) == 3
    assert smallest == sorted(smallest, key=lambda gpu: gpu.memory)


def test_the_cpu_has_one_ledger_and_no_budget(on_cpu) -> None:
    text = render_text(on_cpu)
    assert "of tensors on the CPU; no budget was given; at the peak" in text.splitlines()[0]
    assert "reserved" not in text
    assert "device" not in text


def test_a_terminal_gets_colour_and_no_color_takes_it_away(small, monkeypatch) -> None:
    def output() -> str:
        buffer = io.StringIO()
        print_estimate(small, Console(file=buffer, force_terminal=True, width=100))
        return buffer.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[1;32mfits\x1b[0m" in output()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[1;32m" not in output()
    assert "\x1b" not in render_text(small)


def test_html_says_the_same_and_escapes_it(small) -> None:
    hostile = dataclasses.replace(small, job="<script>alert(1)</script>", notes=("a < b",))
    html = render_html(hostile)
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "a &lt; b" in html
    assert format_bytes(small.peak.device) in html
    for name in small.phases:
        assert f">{name}</td>" in html
    assert not re.search(r"https?:|<link|<img|src=", html)
    assert small._repr_html_() == render_html(small)


def test_a_range_names_its_unit_once_where_it_can() -> None:
    assert format_range(2 * GIB, 3 * GIB) == "2.00–3.00 GiB"
    assert format_range(900 * MIB, 2 * GIB) == "900.0 MiB – 2.00 GiB"
