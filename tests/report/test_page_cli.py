"""`--html` and `--export`: files beside the answer; what cannot be is refused before the work."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

from oomph import cli
from oomph.report.exports.plain import timeline_from_json

JOB = """
import torch
from torch import nn
import oomph

def make():
    batch = (torch.ones(64, 256), torch.zeros(64, 256))
    layers = [nn.Linear(256, 256) for _ in range(4)]
    return oomph.Job(lambda: nn.Sequential(*layers), nn.MSELoss(), "adamw", batch, name="small")
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The option for a small model."""
    file = tmp_path_factory.mktemp("job") / "job.py"
    file.write_text(JOB)
    return "--model", f"{file}:make"


def oomph(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run(arguments)
    return code, out.getvalue(), err.getvalue()


def facts(page: Path) -> dict:
    """The JSON that a page keeps."""
    text = page.read_text()
    start = text.index('id="facts">') + len('id="facts">')
    return json.loads(text[start : text.index("</script>", start)])


def test_an_estimate_is_written_in_every_way_at_once(
    small: tuple[str, str], tmp_path: Path
) -> None:
    page, timeline, events = (tmp_path / name for name in ("a.html", "a.json", "a.trace.json"))
    code, out, _ = oomph(
        *("estimate", *small, "--html", str(page), "--export", str(timeline)),
        *("--export", str(events), "--json"),
    )
    assert code == 0
    assert facts(page) == json.loads(out)
    assert timeline_from_json(timeline.read_bytes()).spans[0].name == "build"
    assert "traceEvents" in json.loads(events.read_text())


def test_a_script_has_a_report_too(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(8, 8).cuda()\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "for _ in range(3):\n"
        "    model(torch.ones(4, 8, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
    )
    page, table = tmp_path / "a.html", tmp_path / "a.csv"
    code, out, _ = oomph(
        *("rehearse", "--gpu", "t4", "--html", str(page), "--export", str(table), "--json"),
        str(script),
    )
    assert code == 0
    assert facts(page) == json.loads(out)
    assert table.read_text().startswith("birth,death,size,category")


@pytest.mark.parametrize(("budget", "code"), [("1MiB", 3), ("100MiB", 0)])
def test_a_plan_has_a_page_and_its_memory_only_if_there_is_one(
    budget: str, code: int, small: tuple[str, str], tmp_path: Path
) -> None:
    page, table = tmp_path / "a.html", tmp_path / "a.csv"
    done, out, _ = oomph(
        *("plan", *small, "--gpu", "cpu", "--budget", budget, "--no-compile", "--json"),
        *("--html", str(page), "--export", str(table)),
    )
    assert done == code
    assert facts(page) == json.loads(out)
    assert table.exists() == (code == 0)


def test_a_training_has_a_report_with_its_steps(small: tuple[str, str], tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    code, out, _ = oomph(
        *("train", *small, "--device", "cpu", "--budget", "100MiB", "--no-compile"),
        *("--steps", "2", "--json", "--html", str(page)),
    )
    assert code == 0
    assert facts(page) == json.loads(out)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--html", "no/such/folder/a.html"), "there is no folder"),
        (("--html", "."), "it is a folder"),
        (("--export", "a.txt"), ".perfetto.json"),
        (("--gpu", "any", "--html", "a.html"), "--html shows one card"),
        (("--gpu", "any", "--export", "a.csv"), "--export shows one card"),
    ],
)
def test_files_that_cannot_be_are_refused_in_a_line(
    arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = oomph("estimate", "--model", "gpt2", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_files_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oomph.files.writing.os.access", lambda *_: False)  # root may all
    code, _, err = oomph("estimate", "--model", "gpt2", "--html", str(tmp_path / "a.html"))
    assert code == 2
    assert "nothing may be written" in err
