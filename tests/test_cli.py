"""The command line: exit codes, JSON that is only JSON, one line for every error."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from oomph import cli
from oomph.cli import catalogues

SMALL = ("--model", "gpt2", "--batch", "1", "--seq", "64")
QUICK = ("--phase", "build", "--phase", "eval")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one command did."""

    code: int
    out: str
    err: str

    def json(self) -> dict:
        return json.loads(self.out)


def oomph(*arguments: str) -> Result:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run(arguments)
    return Result(code=code, out=out.getvalue(), err=err.getvalue())


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python as a process of its own."""
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env)


def refused(result: Result, *words: str) -> bool:
    """Whether it is a usage error: one line on stderr with these words, nothing else."""
    assert result.code == 2
    assert result.out == ""
    assert result.err.count("\n") == 1
    assert result.err.startswith("oomph: ")
    return all(word in result.err for word in words)


@pytest.fixture(scope="module")
def fitting() -> Result:
    return oomph("estimate", *SMALL, "--gpu", "rtx-4090", "--json")


# --- without a model --------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["--help"], ["estimate", "--help"], ["gpus"], ["models"]])
def test_help_and_catalogues_need_no_torch(command) -> None:
    script = (
        "import sys; from oomph.cli import run; "
        f"code = run({command!r}); "
        "found = {'torch', 'transformers', 'scipy'} & sys.modules.keys(); "
        "sys.exit(f'imported {found}' if found else code)"
    )
    done = python("-c", script)
    assert done.returncode == 0, done.stderr
    assert "estimate" in done.stdout or "memory" in done.stdout or "gpt2" in done.stdout


def test_python_m_oomph_says_its_version() -> None:
    done = python("-m", "oomph", "--version")
    assert done.returncode == 0
    assert done.stdout.startswith("oomph ")


def test_without_arguments_there_is_help() -> None:
    result = oomph()
    assert result.code == 0
    assert "Usage: oomph" in result.out


def test_gpus_are_listed() -> None:
    result = oomph("gpus")
    assert result.code == 0
    row = next(line for line in result.out.splitlines() if line.startswith("  rtx-4090 "))
    assert "ada" in row
    assert "23.51 GiB" in row
    assert max(map(len, result.out.splitlines())) <= 80


def test_gpus_as_json() -> None:
    result = oomph("gpus", "--json")
    h200 = result.json()["gpus"]["h200"]
    assert h200["memory"] > 139 * 2**30
    assert h200["compute_capability"] == [9, 0]
    assert 985e12 < h200["rates"]["bf16"] < 995e12
    assert set(h200) >= {"memory_bandwidth", "host_link", "architecture"}


def test_models_are_listed() -> None:
    result = oomph("models")
    assert result.code == 0
    assert any(line.startswith("  llama-3.1-8b ") for line in result.out.splitlines())
    assert max(map(len, result.out.splitlines())) <= 80


def test_models_as_json() -> None:
    models = oomph("models", "--json").json()["models"]
    assert models["gpt2"]["kind"] == "causal-lm"
    assert len(models) >= 25


# --- estimates --------------------------------------------------------------------------------


def test_a_job_that_fits_exits_with_0(fitting) -> None:
    assert fitting.code == 0
    assert fitting.json()["verdict"] == "fits"


def test_the_json_has_the_keys_that_stay(fitting) -> None:
    answer = fitting.json()
    assert answer["schema_version"] == 1
    for ledger in ("allocated", "reserved", "device"):
        peak, interval = answer["peak"][ledger], answer["interval"][ledger]
        assert interval["low"] <= peak <= interval["high"]
        assert all(0 < phase[ledger] <= peak for phase in answer["phases"].values())
    steps = {"first step", "step", "later steps"}
    assert set(answer["phases"]) == {"build", *steps, "eval", "save"}
    assert answer["categories_at_peak"]["parameter"] > 124_000_000 * 4
    assert set(answer["peak_at"]) == {"phase", "module", "op"}
    assert answer["budget"] == int(23.51 * 2**30)
    assert answer["seconds"] > 0


def test_json_is_alone_on_stdout_and_stderr_is_silent(fitting) -> None:
    assert fitting.out.startswith("{")
    assert fitting.err == ""


def test_a_job_that_does_not_fit_exits_with_3() -> None:
    result = oomph("estimate", *SMALL, *QUICK, "--budget", "100MiB")
    assert result.code == 3
    first, second, *_ = result.out.splitlines()
    assert first.startswith("does not fit: gpt2 needs ")
    assert "of a budget of 100.0 MiB on h200" in first
    assert second.startswith("The smallest budget it would run in: ")


def test_a_budget_inside_the_interval_is_inconclusive_and_exits_with_5() -> None:
    answer = oomph("estimate", *SMALL, *QUICK, "--json").json()
    result = oomph(
        "estimate", *SMALL, *QUICK, "--json", "--budget", str(answer["peak"]["device"] + 2**20)
    )
    assert result.code == 5
    assert result.json()["verdict"] == "inconclusive"


def test_only_the_phases_asked_for_are_shown() -> None:
    result = oomph("estimate", *SMALL, "--phase", "first-step", "--gpu", "cpu", "--json")
    assert list(result.json()["phases"]) == ["first step"]


def test_the_cpu_is_a_device_too() -> None:
    result = oomph("estimate", *SMALL, *QUICK, "--gpu", "cpu", "--budget", "100MiB", "--json")
    assert result.code == 3
    assert result.json()["gpu"] is None


def test_options_reach_the_job() -> None:
    plain = oomph("estimate", *SMALL, "--gpu", "cpu", "--json").json()
    leaner = oomph(
        *("estimate", *SMALL, "--gpu", "cpu", "--json"),
        *("--optimizer", "sgd", "--precision", "bf16", "--checkpointing", "full"),
        *("--micro-batch", "1"),
    ).json()
    assert "optimizer state" in plain["categories_at_peak"]
    assert "optimizer state" not in leaner["categories_at_peak"]
    parameters = plain["categories_at_peak"]["parameter"]
    assert leaner["categories_at_peak"]["parameter"] * 2 == parameters


def test_inputs_replace_the_sample_batch() -> None:
    command = ("estimate", "--model", "gpt2", "--gpu", "cpu", "--phase", "eval", "--json")
    sampled = oomph(*command, "--batch", "2", "--seq", "64").json()
    inputs = ("--input", "input_ids=2x64:int64", "--input", "labels=2x64:int64")
    given = oomph(*command, *inputs).json()
    assert given["peak"] == sampled["peak"]
    masked = oomph(*command, *inputs, "--input", "attention_mask=2x64:bool").json()
    assert masked["categories_at_peak"]["input"] == given["categories_at_peak"]["input"] + 2 * 64


def test_allocator_options_change_what_is_reserved() -> None:
    command = ("estimate", *SMALL, *QUICK, "--json")
    default = oomph(*command).json()
    expandable = oomph(*command, "--allocator", "expandable_segments:True").json()
    assert expandable["peak"]["allocated"] <= default["peak"]["allocated"]
    assert expandable["peak"]["reserved"] != default["peak"]["reserved"]


# --- models of one's own ----------------------------------------------------------------------

FACTORY = """
from __future__ import annotations
from dataclasses import dataclass
import torch, oomph
from torch import nn
print("hello from the user's file")

@dataclass
class Shape:
    width: int

def make():
    loss = lambda model, batch: model(batch["x"]).sum()
    model = nn.Linear(Shape(width=1000).width, 1000)
    return oomph.Job(model, loss, "sgd", {"x": torch.ones(8, 1000)}, name="mine")

def not_a_job():
    return 3

def failing():
    raise KeyError("no such thing")

def raising_in_forward():
    def loss(model, batch):
        raise RuntimeError("the user's own mistake")
    return oomph.Job(nn.Linear(2, 2), loss, "sgd", {"x": torch.ones(8, 2)})

def frozen():
    model = nn.Linear(2, 2).requires_grad_(False)
    return oomph.Job(model, lambda m, b: m(b).sum(), "sgd", torch.ones(8, 2))
"""


@pytest.fixture
def factory(tmp_path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(FACTORY)
    return str(file)


def test_a_factory_makes_the_job_and_cannot_spoil_the_json(factory) -> None:
    result = oomph("estimate", "--model", f"{factory}:make", "--gpu", "cpu", "--json")
    assert result.code == 0
    assert result.json()["job"] == "mine"
    assert result.json()["categories_at_peak"]["parameter"] == 4 * (1000 * 1000 + 1000)
    assert "hello from the user's file" in result.err


def test_options_and_inputs_change_a_factorys_job(factory) -> None:
    result = oomph(
        *("estimate", "--model", f"{factory}:make", "--gpu", "cpu", "--json", "--phase", "eval"),
        *("--input", "x=20000x1000:float32"),
    )
    assert result.json()["categories_at_peak"]["input"] == 20000 * 1000 * 4


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("absent", "has no function 'absent'"),
        ("not_a_job", "returned int, not an oomph.Job"),
        ("failing", "failed: KeyError: 'no such thing'"),
        ("raising_in_forward", "RuntimeError: the user's own mistake"),
        ("frozen", "nothing to train"),
        ("not an identifier", "file.py:function"),
    ],
)
def test_what_a_factory_does_wrong_is_said(factory, function, words) -> None:
    result = oomph("estimate", "--model", f"{factory}:{function}", "--gpu", "cpu")
    assert result.code == 2
    assert words in result.err.splitlines()[-1]
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import a_module_nobody_has", "ModuleNotFoundError"),
        ("def (", "SyntaxError"),
        ("raise SystemExit(0)", "SystemExit"),
    ],
)
def test_a_factory_file_that_fails_to_import_is_refused(tmp_path, text, words) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text)
    assert refused(oomph("estimate", "--model", f"{file}:make"), "failed to import", words)


def test_a_factory_brings_its_own_batch(factory) -> None:
    result = oomph("estimate", "--model", f"{factory}:make", "--batch", "4")
    assert refused(result, "makes its own batch")


def test_a_config_file_or_its_folder_is_a_model(tmp_path) -> None:
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = ("--batch", "2", "--seq", "16", "--gpu", "cpu", "--json")
    by_file = oomph("estimate", "--model", str(tmp_path / "config.json"), *command)
    by_folder = oomph("estimate", "--model", str(tmp_path), *command)
    assert by_file.code == 0
    assert by_file.json()["job"] == "GPT2LMHeadModel"
    assert by_file.json()["peak"] == by_folder.json()["peak"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[1, 2]", "is not a config"),
        ('{"n_layer": 1}', "has no model_type"),
        ('{"model_type": "gpt22"}', "did you mean gpt2"),
        ('{"model_type": "gpt2", "architectures": ["FrobForCausalLM"]}', "FrobForCausalLM"),
        ('{"model_type": "gpt2", "n_embd": 100, "n_head": 7, "n_layer": 1}', "cannot build"),
    ],
)
def test_a_malformed_or_unknown_config_is_refused(tmp_path, text, words) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    assert refused(oomph("estimate", "--model", str(file), "--seq", "16", *QUICK), words)


# --- scripts ----------------------------------------------------------------------------------

SCRIPT = """
import sys
import torch
print("arguments:", *sys.argv[1:])
assert torch.cuda.is_available()
width = int(sys.argv[1])
model = torch.nn.Linear(width, width, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(8, width, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path) -> str:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return str(file)


def test_a_script_is_rehearsed_with_its_own_arguments(script) -> None:
    result = oomph("rehearse", "--gpu", "rtx-4090", "--json", script, "1024", "--json", "--gpu=x")
    assert result.code == 0, result.err
    assert result.json()["gpu"] == "rtx-4090"
    assert result.json()["job"] == "train.py"
    assert result.json()["categories_at_peak"]["parameter"] == 1024 * 1024 * 4
    assert "arguments: 1024 --json --gpu=x" in result.err


def test_a_script_that_does_not_fit_exits_with_3_and_the_answer_comes_first(script) -> None:
    result = oomph("rehearse", "--budget", "1GiB", "--steps", "1", script, "20000")
    assert result.code == 3
    assert result.out.startswith("does not fit: train.py needs ")


def test_a_scripts_own_json_option_is_not_ours(script) -> None:
    result = oomph("rehearse", script, "not a number", "--json")
    assert result.code == 2
    assert result.out == ""
    assert "train.py:6" in result.err.splitlines()[-1]


def test_a_script_that_is_not_there_is_refused() -> None:
    assert refused(oomph("rehearse", "missing.py"), "there is no file missing.py")
    assert refused(oomph("rehearse", "--gpu", "abacus", __file__), "unknown GPU 'abacus'")


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "gpt3"], ["unknown model 'gpt3'", "did you mean gpt2"]),
        (["--model", "missing/config.json"], ["there is no missing/config.json"]),
        (["--model", "missing.py:make"], ["there is no file missing.py"]),
        (["--model", "train.py"], ["file.py:function"]),
        ([*SMALL, "--gpu", "rtx-4091"], ["unknown GPU 'rtx-4091'", "rtx-4090"]),
        ([*SMALL, "--precision", "fp8"], ["unknown precision 'fp8'"]),
        ([*SMALL, "--optimizer", "adamx"], ["unknown optimizer 'adamx'", "adam"]),
        ([*SMALL, "--checkpointing", "some"], ["none or full"]),
        ([*SMALL, "--phase", "stepp"], ["unknown phase 'stepp'", "step"]),
        ([*SMALL, "--allocator", "frob:1"], ["frob"]),
        ([*SMALL, "--micro-batch", "0"], ["at least one sample"]),
        (["--model", "gpt2", "--seq", "100000"], ["takes 1024 tokens, not 100000"]),
        (["--model", "llama-3.2-1b", "--batch", str(10**9), "--seq", str(10**9)], ["overflow"]),
        ([], ["--model"]),
        ([*SMALL, "--frobnicate"], ["--frobnicate"]),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(arguments, words) -> None:
    assert refused(oomph("estimate", *arguments), *words)


@pytest.mark.parametrize("budget", ["0", "-1GiB", "nan", "inf", "1e9TiB", "24 bananas", ""])
def test_absurd_budgets_are_refused(budget) -> None:
    assert refused(oomph("estimate", *SMALL, f"--budget={budget}"), repr(budget))


@pytest.mark.parametrize("option", ["--batch", "--seq"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "1.5", "99999999999999"])
def test_absurd_batches_and_lengths_are_refused(option, value) -> None:
    assert refused(oomph("estimate", "--model", "gpt2", f"{option}={value}"))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("input_ids", "name=shape:dtype"),
        ("input_ids=4x:int64", "name=shape:dtype"),
        ("input_ids=4x16", "name=shape:dtype"),
        ("input_ids=-4x16:int64", "name=shape:dtype"),
        ("input_ids=0x16:int64", "whole number"),
        ("input_ids=4x16:int65", "int65"),
        ("input_ids=4x16:load", "load"),
        ("input_ids=4x16:int64", "labels"),
    ],
)
def test_inputs_that_cannot_be_read_are_refused(spec, words) -> None:
    assert refused(oomph("estimate", "--model", "gpt2", "--input", spec), words)


@pytest.mark.parametrize(
    "arguments", [("estimate", "--model", "gpt3"), ("estimate", "--batch", "x"), ("frob",)]
)
def test_errors_are_json_too_when_json_is_asked_for(arguments) -> None:
    result = oomph(*arguments, "--json")
    assert result.code == 2
    assert set(result.json()) == {"schema_version", "error"}
    assert result.err == f"oomph: {result.json()['error']}\n"


def test_an_internal_error_asks_for_a_report_and_hides_its_traceback(monkeypatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(catalogues, "known_gpus", broken)
    monkeypatch.delenv("OOMPH_DEBUG", raising=False)
    result = oomph("gpus")
    assert result.code == 1
    assert result.err.count("\n") == 1
    assert "internal error: ZeroDivisionError: on purpose (please report it" in result.err
    monkeypatch.setenv("OOMPH_DEBUG", "1")
    assert "Traceback" in oomph("gpus").err


def test_the_process_exits_with_the_verdict_and_writes_no_colour_to_a_pipe() -> None:
    done = python("-m", "oomph", "estimate", *SMALL, *QUICK, "--budget", "100MiB")
    assert done.returncode == 3
    assert done.stdout.startswith("does not fit: gpt2")
    assert "\x1b" not in done.stdout
    assert done.stderr == ""
