"""`oomph explain --html` and `oomph run --html`: the cause first, its numbers those of the JSON."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from test_page_cli import facts, oomph
from test_page_document import Document

from oomph.explaining import watching
from oomph.explaining.explanation import explain_values
from oomph.explaining.meters import Reading, Refusal, Sample
from oomph.report.page.document import render_page
from oomph.report.page.sources import page_of_explanation
from oomph.units import MIB, format_bytes

#: As `oomph run` and `oomph.watch` write it.
REPORT: dict[str, Any] = {
    "kind": "oomph watch",
    "schema_version": 1,
    "verdict": "does_not_fit",
    "headline": "out of memory in forward (train.py:9): memory grew from step to step",
    "asked": 8 * MIB,
    "memory": {
        "allocated": 50 * MIB,
        "reserved": 60 * MIB,
        "limit": 64 * MIB,
        "total": 100 * MIB,
        "free": 30 * MIB,
        "hidden": 4 * MIB,
        "others": 6 * MIB,
    },
    "causes": [
        {"kind": "leak", "size": 40 * MIB, "sentence": "memory grew from step to step"},
        {"kind": "large_logits", "size": 20 * MIB, "sentence": "scores take 20 MiB"},
        {"kind": "does_not_fit", "size": MIB, "sentence": "it does not fit"},
    ],
    "remedies": [{"do": "loss.item()", "saves": 40 * MIB, "enough": True, "why": "no graph"}],
    "categories": {"kept": 40 * MIB, "parameter": 10 * MIB},
    "modules": {"<b>head</b>": 10 * MIB},
    "held": [{"name": "losses", "place": "train.py:12", "size": 40 * MIB}],
    "history": [[1, 10 * MIB, 20 * MIB], [2, 30 * MIB, 40 * MIB]],
}


class FullGpu:
    """A device of 64 MiB that has nothing left."""

    device, gpu = "full:0", None
    reading = Reading(
        allocated=60 * MIB, reserved=64 * MIB, limit=64 * MIB, total=64 * MIB, free=0, hidden=0
    )
    refusal = Refusal(asked=8 * MIB, reading=reading)

    def is_ready(self) -> bool:
        return True

    def sample(self) -> Sample:
        return Sample(allocated=60 * MIB, reserved=64 * MIB, peak=60 * MIB)

    def read(self) -> Reading:
        return self.reading

    def holds(self, _: Any) -> bool:
        return False


def figures(page: str) -> dict[str, tuple[int, str]]:
    """Bytes and words of each figure, by where it is in the facts."""
    found = re.findall(r'<data value="(\d+)" data-key="([^"]+)">([^<]+)</data>', page)
    return {key: (int(value), text) for value, key, text in found}


def at(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values[name]
    return values


def watched(**other: Any) -> str:
    return render_page(page_of_explanation(explain_values({**REPORT, **other}, "a/report.json")))


def test_the_cause_comes_first_then_what_to_do() -> None:
    page = watched()
    answer = page.index('<p class="answer"><span aria-hidden="true">✗</span> out of memory</p>')
    cause = page.index("<p>in forward (train.py:9): memory grew from step to step</p>")
    remedy = page.index("<p>try loss.item(): would save 40.00 MiB (predicted)")
    assert answer < cause < remedy < page.index("By category")
    assert "<h1>report.json</h1>" in page


def test_figures_are_the_numbers_of_the_json() -> None:
    page = watched()
    values = Document(page).embedded("facts")
    found = figures(page)
    assert list(found) == [
        "details.asked",
        "ledgers.device",
        "ledgers.reserved",
        "ledgers.allocated",
    ]
    for key, (value, text) in found.items():
        assert value == at(values, key)
        assert text == format_bytes(value)


def test_what_was_alive_is_in_tables_and_escaped() -> None:
    page = watched()
    assert '<th scope="row">kept</th>' in page
    assert '<th scope="row">&lt;b&gt;head&lt;/b&gt;</th>' in page
    assert '<th scope="row">train.py:12</th>' in page
    assert "Allocated after each step" in page
    assert "scores take 20 MiB" in page
    assert "<b>head" not in page


def test_the_bar_ends_at_whatever_ended_first() -> None:
    # Of its own limit of 64 MiB 4 are left; of the card's 100 MiB 30.
    assert "68.00 MiB of 64.00 MiB" in watched()
    # Others left only 2 MiB of the card.
    full = {**REPORT["memory"], "free": 2 * MIB}
    assert "106.0 MiB of 100.0 MiB" in watched(memory=full)


def test_a_request_nobody_knows_has_neither_figure_nor_bar() -> None:
    page = watched(asked=0)
    assert "details.asked" not in figures(page)
    assert '<figure class="gauge">' in watched()
    assert '<figure class="gauge">' not in page


def test_explain_writes_a_page_beside_its_answer(tmp_path: Path) -> None:
    block = {"size": 100 * MIB, "state": "active_allocated", "frames": []}
    value = {"segments": [{"total_size": 128 * MIB, "blocks": [block]}], "device_traces": []}
    snapshot, target = tmp_path / "snapshot.pickle", tmp_path / "a.html"
    snapshot.write_bytes(pickle.dumps(value))
    code, out, _ = oomph("explain", str(snapshot), "--html", str(target), "--json")
    page = target.read_text()
    assert code == 0
    assert facts(target) == json.loads(out)
    assert "</span> memory snapshot</p>" in page
    assert figures(page)["ledgers.reserved"] == (128 * MIB, "128.0 MiB")


def test_the_json_of_an_estimate_keeps_its_verdict() -> None:
    estimate = {
        "job": "tiny",
        "gpu": "t4",
        "verdict": "does_not_fit",
        "budget": MIB,
        "smallest_budget": 3 * MIB,
        "peak": {"allocated": MIB, "reserved": 2 * MIB, "device": 3 * MIB},
        "peak_at": {"phase": "step", "module": "head", "op": "mm"},
        "categories_at_peak": {"activation": MIB},
        "modules_at_peak": {"head": MIB},
    }
    page = render_page(page_of_explanation(explain_values(estimate, "e.json")))
    assert '<div class="verdict does-not-fit">' in page
    assert "<small>predicted</small>" in page


def test_run_writes_a_page_only_where_memory_ran_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "find_meter", FullGpu)
    script, target = tmp_path / "train.py", tmp_path / "a.html"
    report = tmp_path / "report.json"
    command = ("run", "--html", str(target), "--report", str(report), str(script))
    script.write_text("print('fine')")
    assert oomph(*command)[:2] == (0, "fine\n")
    assert not target.exists()
    script.write_text("import torch\nraise torch.OutOfMemoryError('no more')")
    code, _, err = oomph(*command)
    assert code == 3
    assert err.splitlines()[-1] == f"oomph: the page is in {target}"
    page = target.read_text()
    assert facts(target)["details"] == json.loads(report.read_text())
    assert "<h1>train.py</h1>" in page
    assert figures(page)["details.asked"][0] == 8 * MIB


def test_a_page_that_cannot_be_written_is_refused_before_the_script_runs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('ran')")
    code, out, err = oomph("run", "--html", str(tmp_path / "no" / "a.html"), str(script))
    assert (code, out) == (2, "")
    assert "there is no folder" in err
