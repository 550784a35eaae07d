"""The page in a headless Chromium: silent, alone, and usable with a keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recorded import random_timeline, small_estimate

from benchmarks.browser import Browser, browsing, find_browser
from oomph.rehearsal.allocator import AllocatorSettings
from oomph.rehearsal.estimation import Estimate
from oomph.rehearsal.timeline import Block, Timeline
from oomph.report.history import History, history_of
from oomph.report.page.contents import Line, Page
from oomph.report.page.document import save_page
from oomph.report.page.samples import take_samples
from oomph.report.report import Report
from oomph.units import format_bytes

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="needs chromium and its chromedriver"
)

EVENTS = 100_000
NOW = "return Number(document.getElementById('chart').getAttribute('aria-valuenow'))"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as window:
        yield window


@pytest.fixture(scope="module")
def estimate() -> Estimate:
    return small_estimate()


@pytest.fixture(scope="module")
def page(estimate: Estimate, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "estimate.html"
    estimate.save_html(path)
    return path


@pytest.fixture
def shown(browser: Browser, page: Path) -> Browser:
    """The estimate's page, freshly opened."""
    browser.open(page)
    return browser


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    history = History(
        timeline=random_timeline(EVENTS), settings=AllocatorSettings.parse(""), overhead=1 << 29
    )
    report = Report(verdict="fits", headline="", advice=(), tables=(), lists=(), seconds=0.0)
    page = Page(title="large", report=report, facts={}, closing="", history=history)
    path = tmp_path_factory.mktemp("page") / "large.html"
    save_page(page, path)
    return path


def values(browser: Browser, attribute: str) -> dict[str, tuple[int, str]]:
    """Value and text of each <data> element, by one of its attributes."""
    found: dict[str, Any] = browser.run(
        f"""return Object.fromEntries([...document.querySelectorAll("[{attribute}]")].map((one) =>
        [one.getAttribute("{attribute}"), [one.value, one.textContent]]))"""
    )
    return {name: (int(value), text) for name, (value, text) in found.items()}


def focus(browser: Browser, name: str) -> None:
    browser.run("document.getElementById(arguments[0]).focus()", name)


def test_it_complains_of_nothing_and_asks_for_nothing_else(browser: Browser, page: Path) -> None:
    browser.complaints(), browser.requests()
    browser.open(page)
    assert browser.complaints() == []
    assert browser.requests() == [page.as_uri()]


def test_the_policy_is_enforced(shown: Browser) -> None:
    shown.run("""const script = document.createElement("script");
        script.textContent = "document.title = 'owned'"; document.body.append(script)""")
    fetched = shown.wait("fetch('data:,x').then(() => done('yes'), () => done('no'))")
    assert fetched == "no"
    assert "owned" not in shown.run("return document.title")
    assert any("Content Security Policy" in words for words in shown.complaints())


def test_a_module_name_runs_nothing(shown: Browser, estimate: Estimate) -> None:
    assert shown.run("return document.title") == "<b>body</b> on rtx-4090: inconclusive"
    assert shown.run("return document.querySelectorAll('b script, main script').length") == 0


def test_what_is_alive_at_the_peak_is_the_estimates(shown: Browser, estimate: Estimate) -> None:
    alive = values(shown, "data-category")
    rounding, _ = alive.pop("rounding")
    assert {name: size for name, (size, _) in alive.items() if size} == estimate.categories_at_peak
    ledgers = {name: size for name, (size, _) in values(shown, "data-ledger").items()}
    assert ledgers["allocated"] == estimate.peak.allocated
    assert rounding == estimate.peak.allocated - sum(estimate.categories_at_peak.values())


def test_every_figure_is_the_json_s_number(shown: Browser, estimate: Estimate) -> None:
    figures = values(shown, "data-key")
    expected = {
        f"peak.{name}": (size, format_bytes(size)) for name, size in estimate.peak.as_dict().items()
    }
    assert figures == expected


def test_the_keyboard_moves_through_time(shown: Browser, estimate: Estimate) -> None:
    samples = take_samples(history_of(estimate))
    focus(shown, "chart")
    assert shown.run(NOW) == estimate.peak_at.event
    for keys, place in ((("Home",), 0), (("Right", "Right", "Right"), 3), (("Left",), 2)):
        shown.press(*keys)
        event = int(samples.events[place])
        assert shown.run(NOW) == event
        alive = values(shown, "data-category")
        assert {name: alive[name][0] for name in samples.categories} == samples.at(event)
        assert all(text == format_bytes(size) for size, text in alive.values())
    shown.press("End")
    assert shown.run(NOW) == int(samples.events[-1])
    words = shown.run("return document.getElementById('chart').getAttribute('aria-valuetext')")
    assert f"{format_bytes(int(samples.allocated[-1]))} allocated" in words
    shown.run("document.getElementById('to-peak').click()")
    assert shown.run(NOW) == estimate.peak_at.event


def chart_place(browser: Browser) -> tuple[int, int, int]:
    """Left end, width and middle height of the plot in the window."""
    left, top, width = browser.run(
        """const box = document.getElementById("chart"); box.scrollIntoView();
        const place = box.getBoundingClientRect(); return [place.left, place.top, place.width]"""
    )
    return int(left) + 66, int(width) - 80, int(top) + 150


def test_a_click_chooses_a_moment(shown: Browser, estimate: Estimate) -> None:
    left, width, top = chart_place(shown)
    shown.click(left + width // 4, top)
    stop = history_of(estimate).stop
    assert abs(shown.run(NOW) - stop / 4) <= stop / 50


def test_dragging_zooms_and_escape_shows_the_whole(shown: Browser) -> None:
    pieces = "return document.querySelectorAll('.piece.phases').length"
    whole = shown.run(pieces)
    left, width, top = chart_place(shown)
    shown.drag((left + width // 2, top), (left + width // 2 + 40, top))
    assert shown.run(pieces) < whole
    focus(shown, "chart")
    shown.press("Escape")
    assert shown.run(pieces) == whole


def test_a_phase_can_be_chosen(shown: Browser) -> None:
    names = shown.run("return [...document.getElementById('window').options].map((o) => o.text)")
    assert names[:3] == ["the whole", "build", "first step"]
    shown.run(
        """const select = document.getElementById("window"); select.value = 2;
        select.dispatchEvent(new Event("change"))"""
    )
    names = shown.run(
        """return [...document.querySelectorAll('.piece-name')].map((one) => one.textContent)"""
    )
    assert "first step" in names
    assert "build" not in names


def test_the_chart_is_a_table_too(shown: Browser, estimate: Estimate) -> None:
    rows = shown.run(
        """return [...document.querySelectorAll('#phase-table tbody tr')].map((row) =>
        [...row.children].map((cell) => cell.textContent))"""
    )
    shown_peaks = {row[0]: row[2] for row in rows}
    for name, ledgers in estimate.phases.items():
        if name in shown_peaks:
            assert shown_peaks[name] == format_bytes(ledgers.allocated)
    assert {"build", "first step", "step"} <= shown_peaks.keys()


def test_the_map_goes_into_modules_and_back_by_keyboard(shown: Browser, estimate: Estimate) -> None:
    inside = "return document.querySelector('#module-table caption').textContent"
    sizes = "return [...document.querySelectorAll('#module-table data')].map((d) => +d.value)"
    assert sum(shown.run(sizes)) == sum(estimate.categories_at_peak.values())
    shown.run("document.querySelector('#treemap [tabindex=\"0\"]').focus()")
    shown.press("Enter")
    assert shown.run(inside).startswith("Inside layers")
    shown.press("Backspace")
    assert shown.run(inside) == "Inside the model and outside of it"
    first = shown.run("return document.activeElement.getAttribute('aria-label')")
    shown.press("Right")
    assert shown.run("return document.activeElement.getAttribute('aria-label')") != first


def test_repeated_blocks_can_be_told_apart(shown: Browser) -> None:
    shown.run("document.getElementById('together').click()")
    shown.run("document.querySelector('#treemap [tabindex=\"0\"]').focus()")
    shown.press("Enter")
    names = (
        "return [...document.querySelectorAll('#module-table tbody th')].map(t => t.textContent)"
    )
    assert {"0", "1", "2"} <= set(shown.run(names))


def search(browser: Browser, text: str) -> str:
    browser.run(
        """const search = document.getElementById("search"); search.value = arguments[0];
        search.dispatchEvent(new Event("input"))""",
        text,
    )
    return str(browser.run("return document.getElementById('found').textContent"))


def test_allocations_are_found_by_words(shown: Browser, estimate: Estimate) -> None:
    stop = history_of(estimate).stop
    blocks = [block for block in estimate.timeline.blocks if block.birth < stop]
    wanted = [b for b in blocks if "layers.1" in b.module and b.category == "gradient"]
    assert wanted
    assert search(shown, "") == f"{len(blocks):,} allocations"
    assert search(shown, "GRADIENT layers.1") == f"{len(wanted):,} allocations"
    assert search(shown, "no such thing") == "0 allocations"


def test_those_alive_at_the_moment_add_up(shown: Browser, estimate: Estimate) -> None:
    shown.run("document.getElementById('only-alive').click()")
    alive = estimate.timeline.alive_at(estimate.peak_at.event)
    total = format_bytes(sum(block.size for block in alive))
    found = shown.run("return document.getElementById('found').textContent")
    assert found == f"{len(alive):,} allocations, {total}"


def test_a_header_sorts_its_column_and_says_so(shown: Browser) -> None:
    births = """return [...document.querySelectorAll('#allocation-table td.born')].map((cell) =>
        Number(cell.textContent.replaceAll(",", "")))"""
    for way in ("descending", "ascending"):
        shown.run("document.querySelector('#allocation-table th.born button').click()")
        sort = "return document.querySelector('#allocation-table th.born').ariaSort"
        assert shown.run(sort) == way
        numbers = shown.run(births)
        assert numbers == sorted(numbers, reverse=way == "descending")
        assert len(numbers) > 5


def test_a_row_leads_to_the_moment_of_its_birth(shown: Browser) -> None:
    birth = shown.run(
        """const button = document.querySelector('#allocation-table td.born button');
        button.click(); return Number(button.textContent.replaceAll(",", ""))"""
    )
    assert shown.run(NOW) == birth


def test_the_button_changes_light_to_dark_and_back(shown: Browser) -> None:
    colour = "return getComputedStyle(document.body).backgroundColor"
    light = shown.run(colour)
    focus(shown, "theme")
    shown.press("Enter")
    assert shown.run(colour) != light
    shown.press("Enter")
    assert shown.run(colour) == light


def test_a_dark_system_gets_a_dark_page_and_a_narrow_one_is_not_cut(page: Path) -> None:
    with browsing((390, 800), dark=True) as window:
        window.open(page)
        colour = window.run("return getComputedStyle(document.body).backgroundColor")
        assert max(int(part) for part in colour.strip("rgb()").split(",")) < 60
        assert window.run("return document.documentElement.scrollWidth <= innerWidth")


def test_a_run_without_phases_and_with_words_of_its_own_is_shown(
    browser: Browser, tmp_path: Path
) -> None:
    """As a snapshot is: nobody told its phases, and its categories may be any."""
    blocks = [Block(size=512 * n, birth=n, op="train.py:12") for n in range(50)]
    for block in blocks[::2]:
        block.category = "<i>unknown</i>"  # type: ignore[assignment]
    measured = Line(name="measured", points=tuple((n, 512 * n * n) for n in range(50)))
    page = Page(
        title="snapshot",
        report=Report(verdict="leak", headline="", advice=(), tables=(), lists=(), seconds=0.0),
        facts={},
        closing="",
        history=History(timeline=Timeline(blocks=blocks, events=50)),
        found="measured",
        lines=(measured,),
        budget=1 << 40,
    )
    save_page(page, tmp_path / "snapshot.html")
    browser.complaints()
    browser.open(tmp_path / "snapshot.html")
    assert browser.complaints() == []
    total = sum(block.size for block in blocks)
    assert values(browser, "data-ledger") == {"tensors": (total, format_bytes(total))}
    alive = {name: size for name, (size, _) in values(browser, "data-category").items()}
    assert alive["<i>unknown</i>"] == sum(block.size for block in blocks[::2])
    assert browser.run("return document.querySelectorAll('path.measured').length") == 1
    words = browser.run("return document.querySelector('#chart svg').textContent")
    assert "budget 1.00 TiB, above this chart" in words


def test_a_hundred_thousand_events_keep_few_elements(browser: Browser, large: Path) -> None:
    browser.complaints()
    browser.open(large)
    assert browser.complaints() == []
    rows = "return document.querySelectorAll('#allocation-table tbody tr').length"
    assert 10 < browser.run(rows) < 60
    count = int(
        browser.run("return document.querySelector('#allocation-table table').ariaRowCount")
    )
    assert count > EVENTS / 3
    assert browser.run("return document.querySelectorAll('*').length") < 2000
    browser.run(
        """const box = document.getElementById("allocation-table");
        box.scrollTop = box.scrollHeight; box.dispatchEvent(new Event("scroll"))"""
    )
    last = """return Number([...document.querySelectorAll('#allocation-table tr[aria-rowindex]')]
        .pop().getAttribute("aria-rowindex"))"""
    assert browser.run(last) == count
    peak, text = values(browser, "data-ledger")["allocated"]
    assert peak > 1 << 40
    assert text == format_bytes(peak)
