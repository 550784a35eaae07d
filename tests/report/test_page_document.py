"""The page as a document: one file, no requests, no injection, the numbers of the JSON."""

from __future__ import annotations

import base64
import dataclasses
import errno
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from recorded import EVIL, random_timeline, small_estimate
from switched_on import on
from test_plans import PLAN

from oomph.errors import BadInput
from oomph.files import writing
from oomph.plans.choices import Choices
from oomph.plans.ledgers import Ledgers
from oomph.rehearsal.estimation import Estimate
from oomph.rehearsal.timeline import Timeline
from oomph.report.history import History
from oomph.report.page.contents import Line, Page
from oomph.report.page.document import render_page, save_page
from oomph.report.page.sources import (
    page_of_attempt,
    page_of_estimate,
    page_of_plan,
    page_of_training,
)
from oomph.report.report import Report
from oomph.runs.training import StepDone, Trained
from oomph.search.attempt import NoPlan
from oomph.search.changes import _differences, settings_shown
from oomph.techniques.technique import techniques
from oomph.units import GIB, format_bytes

VOID = {"meta", "link", "input", "br"}


class Document(HTMLParser):
    """A page, taken apart as a browser does."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        self.unclosed = self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.setdefault(self._open[-1] if self._open else "", []).append(data)

    def having(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for _, attributes in self.tags if name in attributes]

    def embedded(self, name: str) -> Any:
        """The JSON of a script element."""
        kinds = [attributes.get("id") for tag, attributes in self.tags if tag == "script"]
        return json.loads(self.words["script"][kinds.index(name)])


@pytest.fixture(scope="module")
def estimate() -> Estimate:
    return small_estimate()


@pytest.fixture(scope="module")
def text(estimate: Estimate) -> str:
    return render_page(page_of_estimate(estimate))


@pytest.fixture(scope="module")
def document(text: str) -> Document:
    return Document(text)


def planned(**changes: Any) -> Page:
    return page_of_plan(dataclasses.replace(PLAN, **changes))


def test_every_element_is_closed(document: Document) -> None:
    assert document.unclosed == []


def test_the_facts_are_the_estimates_json(document: Document, estimate: Estimate) -> None:
    assert document.embedded("facts") == json.loads(json.dumps(estimate.as_dict()))


def look_up(facts: Any, key: str) -> Any:
    for part in key.split("."):
        facts = facts[part]
    return facts


def test_the_figures_are_the_numbers_of_the_json(document: Document, estimate: Estimate) -> None:
    figures = document.having("data-key")
    assert {str(f["data-key"]) for f in figures} == {
        "peak.device",
        "peak.reserved",
        "peak.allocated",
    }
    for figure in figures:
        assert int(str(figure["value"])) == look_up(estimate.as_dict(), str(figure["data-key"]))
    assert document.words["data"] == [
        format_bytes(size) for size in reversed(estimate.peak.as_dict().values())
    ]


def test_the_verdict_comes_first_and_is_in_the_title(document: Document) -> None:
    sections = [a["id"] for tag, a in document.tags if tag == "section"]
    assert sections[0] == "verdict"
    assert document.words["title"] == ["<b>body</b> on rtx-4090: inconclusive"]


def test_names_of_the_users_code_cannot_become_elements(text: str, document: Document) -> None:
    assert "<b>body" not in text
    assert EVIL not in text
    assert sum(tag == "script" for tag, _ in document.tags) == 3
    modules = document.embedded("memory-data")["allocations"]["modules"]
    assert EVIL.replace(".", " ") in modules


def test_the_policy_allows_this_script_and_style_and_nothing_else(document: Document) -> None:
    (policy,) = [
        str(a["content"])
        for _, a in document.tags
        if a.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest(document.words['script'][-1])}'"
    assert rules["style-src"] == f"'sha256-{digest(document.words['style'][0])}'"
    others = {"default-src", "script-src", "style-src"}
    assert {name: rules[name] for name in rules.keys() - others} == {
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_nothing_points_out_of_the_file(text: str, document: Document) -> None:
    for name in ("src", "href", "action", "poster", "data"):
        for attributes in document.having(name):
            assert str(attributes[name]).startswith(("#", "data:,"))
    urls = set(re.findall(r"https?://[^\"' ]+", text))
    assert urls <= {"http://www.w3.org/2000/svg"}
    assert "url(" not in text.replace("url(#plot)", "")


def test_no_element_has_a_style_or_a_handler_of_its_own(document: Document) -> None:
    names = {name for _, attributes in document.tags for name in attributes}
    assert not {name for name in names if name == "style" or name.startswith("on")}


def test_landmarks_and_labels_are_there(document: Document) -> None:
    tags = [tag for tag, _ in document.tags]
    assert [tags.count(tag) for tag in ("main", "header", "footer", "h1")] == [1, 1, 1, 1]
    identities = [a["id"] for a in document.having("id")]
    assert len(identities) == len(set(identities))
    for attribute in ("aria-labelledby", "aria-describedby"):
        for attributes in document.having(attribute):
            assert attributes[attribute] in identities
    links = [str(a["href"]) for tag, a in document.tags if tag == "a"]
    assert {link.removeprefix("#") for link in links} <= set(identities)
    assert all(a.get("scope") in ("col", "row") for tag, a in document.tags if tag == "th")
    assert all("lang" in a for tag, a in document.tags if tag == "html")


def test_without_a_script_the_answer_and_the_tables_are_there(document: Document) -> None:
    assert "Alive at the predicted peak, by category" in document.words["caption"]
    assert any(tag == "noscript" for tag, _ in document.tags)


def test_a_plan_is_shown_as_a_diff_with_its_settings() -> None:
    document = Document(render_page(planned()))
    rows = [w for w in document.words["th"] if w in {c.technique for c in PLAN.changes}]
    assert rows == [change.technique for change in PLAN.changes]
    assert document.words["del"] == [change.before for change in PLAN.changes]
    assert document.words["ins"] == [change.after for change in PLAN.changes]
    numbers = [float(str(a["value"])) for a in document.having("value") if "data-key" not in a]
    assert numbers == [n for change in PLAN.changes for n in (change.saves, change.costs)]
    code = " ".join(document.words["code"])
    assert 'blocks = {"h.0": "keep", "h.1": "recompute"}' in code
    assert "optimizer_in_backward = false" in code


def test_an_allocator_setting_is_shown_as_people_type_it() -> None:
    change = dataclasses.replace(PLAN.changes[0], technique="allocator")
    choices = Choices(techniques=on(cuda_allocator={"conf": "expandable_segments:True"}))
    document = Document(render_page(planned(changes=(change,), choices=choices)))
    assert document.words["code"] == ["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"]


def test_every_technique_names_its_settings() -> None:
    names = {field.name for field in dataclasses.fields(Choices)}
    names |= {technique.name for technique in techniques()}
    titles = {one.technique for one in _differences(Choices())}
    assert len(titles) > 5
    for title in titles:
        assert settings_shown(title, Choices())
        shown = settings_shown(title, Choices())
        assert {name.partition(".")[0] for name in shown} <= names
    assert settings_shown("loss", Choices()) == {"loss_chunk": None, "head": ""}
    assert settings_shown("channels", Choices()) == {"channels_last.enabled": False}
    assert settings_shown("no such technique", Choices()) == {}


def test_a_plan_from_a_file_has_no_memory_over_time() -> None:
    document = Document(render_page(planned()))
    assert document.embedded("memory-data") == {}
    assert "memory" not in {a.get("id") for a in document.having("id")}


def test_a_checked_plan_shows_its_rehearsal(estimate: Estimate) -> None:
    document = Document(render_page(planned(checked=estimate)))
    assert document.embedded("memory-data")["peak"] == estimate.peak_at.event
    assert document.embedded("facts") == json.loads(json.dumps(PLAN.as_dict()))


def test_that_there_is_no_plan_is_a_page_too() -> None:
    answer = NoPlan(
        job="llama",
        gpu="t4",
        budget=GIB,
        smallest_budget=3 * GIB,
        reason="3 GiB would do",
        seconds=0.5,
    )
    document = Document(render_page(page_of_attempt(answer)))
    (figure,) = document.having("data-key")
    assert int(str(figure["value"])) == 3 * GIB
    assert document.embedded("facts")["verdict"] == "does_not_fit"


def trained(memory: Ledgers | None, checked: Estimate | None) -> Trained:
    steps = tuple(
        StepDone(step=n, loss=2.0, seconds=0.5, samples=4, tokens=64, memory=memory)
        for n in (1, 2, 3)
    )
    plan = dataclasses.replace(PLAN, checked=checked)
    return Trained(plan=plan, device="cuda", steps=steps)


def test_a_training_lays_the_measured_peaks_over_the_prediction(estimate: Estimate) -> None:
    memory = Ledgers(allocated=19 * GIB, reserved=20 * GIB, device=21 * GIB)
    document = Document(render_page(page_of_training(trained(memory, estimate))))
    lines = document.embedded("memory-data")["lines"]
    assert [line["points"] for line in lines] == [[[0, 19 * GIB]], [[0, 21 * GIB]]]
    assert "Predicted and measured" in document.words["caption"]
    facts = document.embedded("facts")
    for figure in document.having("data-key"):
        assert float(str(figure["value"])) == look_up(facts, str(figure["data-key"]))


def test_a_training_on_the_cpu_claims_no_measured_memory(estimate: Estimate) -> None:
    document = Document(render_page(page_of_training(trained(None, estimate))))
    assert document.embedded("memory-data")["lines"] == []
    assert [a["data-key"] for a in document.having("data-key")] == ["measured.seconds"]


def bare(**given: Any) -> Page:
    report = Report(verdict="leak", headline="it grew", advice=(), tables=(), lists=(), seconds=0.0)
    return Page(title="run", report=report, facts={"n": 1}, closing="Measured.", **given)


def test_any_source_can_fill_a_page() -> None:
    history = History(timeline=random_timeline(200))
    document = Document(render_page(bare(history=history, found="measured")))
    assert "Memory over time, measured" in document.words["h2"]
    assert document.embedded("memory-data")["on_gpu"] is False


def test_an_empty_history_has_no_sections() -> None:
    document = Document(render_page(bare(history=History(timeline=Timeline()))))
    assert [a["id"] for tag, a in document.tags if tag == "section"] == ["verdict"]


def test_a_measured_line_keeps_its_peak_however_long_it_is() -> None:
    points = [(event, event % 100) for event in range(50_000)]
    points[31_111] = (31_111, 10**12)
    page = bare(
        history=History(timeline=random_timeline(200)),
        lines=(Line(name="measured", points=tuple(points)),),
    )
    (line,) = Document(render_page(page)).embedded("memory-data")["lines"]
    assert [31_111, 10**12] in line["points"]
    assert len(line["points"]) < 5000
    assert line["points"][0] == [0, 0]
    assert line["points"][-1] == [49_999, 99]


def test_a_page_replaces_a_file_only_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    save_page(bare(), target)
    whole = target.read_text()
    assert whole.endswith("</html>\n")
    with pytest.raises(ValueError, match="JSON"):
        save_page(dataclasses.replace(bare(), facts={"n": float("nan")}), target)
    assert target.read_text() == whole
    assert list(tmp_path.iterdir()) == [target]


def test_a_full_disk_leaves_the_old_page_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "page.html"
    target.write_text("old")

    def half_written(beside: Path) -> None:
        beside.write_text("<!doc")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writing, "open_new", half_written)
    with pytest.raises(BadInput, match=r"cannot write .*page\.html: No space left"):
        save_page(bare(), target)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_place_that_is_not_there_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot write"):
        save_page(bare(), tmp_path / "none" / "page.html")


def test_estimates_and_plans_save_themselves(tmp_path: Path, estimate: Estimate) -> None:
    estimate.save_html(tmp_path / "estimate.html")
    PLAN.save_html(tmp_path / "plan.html")
    for name, result in (("estimate", estimate), ("plan", PLAN)):
        document = Document((tmp_path / f"{name}.html").read_text())
        assert document.embedded("facts") == json.loads(json.dumps(result.as_dict()))
