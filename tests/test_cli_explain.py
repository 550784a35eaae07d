"""`oomph run`, `explain`, `compare` and `advise`: first lines and exit codes."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
from dataclasses import dataclass

import pytest

from oomph import cli
from oomph.units import MIB


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one command did."""

    code: int
    out: str
    err: str


def oomph(*arguments: str) -> Result:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run(arguments)
    return Result(code=code, out=out.getvalue(), err=err.getvalue())


def snapshot(path, size: int) -> str:
    block = {"size": size, "state": "active_allocated", "frames": []}
    value = {"segments": [{"total_size": size, "blocks": [block]}], "device_traces": []}
    path.write_bytes(pickle.dumps(value))
    return str(path)


@pytest.fixture
def files(tmp_path) -> tuple[str, str]:
    return snapshot(tmp_path / "a.pickle", 100 * MIB), snapshot(tmp_path / "b.pickle", 110 * MIB)


def test_explain_answers_in_its_first_line(files) -> None:
    result = oomph("explain", files[0])
    assert result.code == 0
    assert result.out.splitlines()[0] == "100.0 MiB allocated of 100.0 MiB reserved"
    assert result.err == ""


def test_explain_writes_only_json_where_that_is_asked_for(files) -> None:
    values = json.loads(oomph("explain", files[0], "--json").out)
    assert values["kind"] == "oomph explanation"
    assert values["ledgers"] == {"allocated": 100 * MIB, "reserved": 100 * MIB}


@pytest.mark.parametrize("command", [["explain"], ["explain", "--json"], ["compare"]])
@pytest.mark.parametrize(
    "content",
    [
        # A key of tuples without end overflowed the stack of the process: exit code 139.
        b"\x80\x04})" + b"\x85" * 400_000 + b"Ns.",
        # 451 bytes that were printed, compared or hashed for ever.
        b"\x80\x04})\x94" + b"".join(b"h%ch%c\x86\x94" % (n, n) for n in range(90)) + b"Ns.",
        b"\x80\x04}(K\x01u.",
        b"\x1f\x8b\x08\x00" + b"\xff" * 60,
        b'{"traceEvents": [{"name": "[memory]", "ts": "x", "args": {}}]}',
        b'{"kind": "oomph watch", "memory": ' + b"[" * 50_000,
        b'{"smallest_budget": NaN, "reason": ""}',
        b'{"error": "\\u001b[2J\\ud800"}',
    ],
)
def test_files_made_to_do_harm_are_refused_in_one_line(tmp_path, content, command) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    paths = [str(path)] * (2 if command == ["compare"] else 1)
    result = oomph(*command, *paths)
    assert result.code == 2
    (line,) = result.err.splitlines()
    assert line.startswith("oomph: ") and "internal" not in line and line.isprintable()


def test_explain_refuses_code_in_one_line(tmp_path) -> None:
    path = tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps(print, 4))
    result = oomph("explain", str(path))
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert "wants to run code" in result.err


def test_compare_says_what_changed(files) -> None:
    result = oomph("compare", *files)
    assert result.code == 0
    first = result.out.splitlines()[0]
    assert first.startswith("reserved 100.0 MiB → 110.0 MiB, +10.00 MiB (+10.0%)")


@pytest.mark.parametrize(
    ("threshold", "code"), [("2%", 4), ("20%", 0), ("5MiB", 4), ("64MiB", 0), ("lots", 2)]
)
def test_compare_fails_above_a_threshold(files, threshold, code) -> None:
    result = oomph("compare", *files, "--fail-above", threshold)
    assert result.code == code
    if code != 2:
        assert result.out.startswith("regressed: " if code == 4 else "ok: ")


def test_compare_as_json_tells_whether_it_regressed(files) -> None:
    result = oomph("compare", *files, "--fail-above", "2%", "--json")
    assert result.code == 4
    values = json.loads(result.out)
    assert (values["regressed"], values["threshold"], values["decides"]) == (True, "2%", "reserved")
    assert values["ledgers"][0]["change"] == 10 * MIB


def test_run_passes_the_scripts_exit_code_and_arguments(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:]); sys.exit(5)")
    result = oomph("run", str(script), "--json", "--steps", "3")
    assert (result.code, result.out) == (5, "['--json', '--steps', '3']\n")


def test_run_refuses_a_script_that_is_not_there() -> None:
    result = oomph("run", "missing.py")
    assert result.code == 2
    assert result.err == "oomph: there is no script missing.py\n"


def test_advise_answers_in_its_first_line_and_as_json(tmp_path) -> None:
    factory = tmp_path / "tiny.py"
    factory.write_text(
        "import torch, oomph\n"
        "from torch import nn\n"
        "def make():\n"
        "    build = lambda: nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 1000))\n"
        "    loss = lambda model, batch: model(batch).sum()\n"
        "    return oomph.Job(build, loss, 'adamw', torch.ones(2, 16, dtype=torch.long))\n"
    )
    command = ("advise", "--model", f"{factory}:make", "--gpu", "cpu")
    values = json.loads(oomph(*command, "--json").out)
    assert "untied embeddings" in {one["topic"] for one in values["suggestions"]}
    result = oomph(*command)
    assert result.code == 0
    assert result.out.splitlines()[0].startswith("model has 17,000 parameters; a step takes ")
