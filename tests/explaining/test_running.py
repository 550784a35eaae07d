"""`oomph run`: a script runs as Python would run it, and an OOM of it is explained."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from simulated_gpu import SimulatedGpu

from oomph.errors import BadInput
from oomph.explaining.running import OUT_OF_MEMORY, run_script
from oomph.units import MIB

LEAKS = """
import torch
from torch import nn

from helper import WIDTH

net = nn.Linear(WIDTH, WIDTH)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
outputs = []
for step in range(1000):
    net(torch.ones(8192, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    outputs.append(net(torch.ones(8192, WIDTH)))
"""


@pytest.fixture
def script(tmp_path):
    def write(text: str):
        path = tmp_path / "train.py"
        path.write_text(text)
        return path

    (tmp_path / "helper.py").write_text("WIDTH = 64\n")
    yield write
    sys.modules.pop("helper", None)


def test_an_oom_is_explained_with_the_scripts_own_names(script, tmp_path, capsys) -> None:
    device, report = SimulatedGpu(64 * MIB), tmp_path / "report.json"
    with device:
        code = run_script(script(LEAKS), ["--x", "a b"], report=report, meter=device)
    assert code == OUT_OF_MEMORY
    values = json.loads(report.read_text())
    assert values["cause"] == "leak"
    assert values["held"][0]["name"] == "outputs"
    assert values["held"][0]["place"] == "train.py:14"
    assert "oomph rehearse --gpu NAME" in values["remedies"][-1]["do"]
    assert "'a b'" in values["remedies"][-1]["do"]
    said = capsys.readouterr().err
    assert said.index("oomph: out of memory") < said.index("Traceback")
    assert "runpy" not in said
    assert "OutOfMemoryError" in said


def test_a_script_finds_its_arguments_its_folder_and_its_name(script, capsys) -> None:
    path = script("import sys, helper\nprint(__name__, sys.argv, __file__, helper.WIDTH)")
    before = list(sys.path), list(sys.argv)
    assert run_script(path, ["--lr", "1"]) == 0
    assert capsys.readouterr().out == f"__main__ {[str(path), '--lr', '1']} {path} 64\n"
    assert (sys.path, sys.argv) == before


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", 0),
        ("raise SystemExit", 0),
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('bad data')", 1),
        ("1 / 0", 1),
    ],
)
def test_the_exit_code_is_the_one_python_would_give(script, capsys, text, code) -> None:
    path = script(text)
    assert run_script(path) == code
    said = capsys.readouterr().err
    python = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    assert python.returncode == code
    assert said.splitlines()[-1:] == python.stderr.splitlines()[-1:]


def test_a_script_with_a_syntax_error_fails_as_in_python(script, capsys) -> None:
    assert run_script(script("def :")) == 1
    assert "SyntaxError" in capsys.readouterr().err


def test_a_script_that_is_not_there_is_refused(tmp_path) -> None:
    with pytest.raises(BadInput, match="no script"):
        run_script(tmp_path / "missing.py")


def test_a_report_that_cannot_be_written_is_refused_before_the_script_runs(
    script, tmp_path, capsys
) -> None:
    with pytest.raises(BadInput, match="no folder"):
        run_script(script("print('ran')"), report=tmp_path / "missing" / "r.json")
    assert capsys.readouterr().out == ""
