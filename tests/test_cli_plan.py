"""`oomph plan` and `oomph train`: the first line, exit codes, JSON, and what is refused."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from oomph import cli
from oomph.errors import HostTooSmall

FACTORY = """
import torch, oomph
from torch import nn
print("hello from the user's file")

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def job(width=64):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(*(Block(width) for _ in range(4)))

    batch = (torch.ones(4, 64, width), torch.zeros(4, 64, width))
    return oomph.Job(build, nn.MSELoss(), "adamw", batch, name="mine")

def make():
    return job()

def flat():
    batch = (torch.ones(1, 64), torch.zeros(1, 8))
    return oomph.Job(lambda: nn.Linear(64, 8), nn.MSELoss(), "adamw", batch)

def wider():
    return job(width=96)

def loaded():
    return job(), [(torch.full((4, 64, 64), 2.0), torch.zeros(4, 64, 64))]

def longer():
    return job(), [(torch.ones(4, 128, 64), torch.zeros(4, 128, 64))]
"""
AMPLE = ("--gpu", "cpu", "--budget", "64MiB")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one command did."""

    code: int
    out: str
    err: str

    def json(self) -> dict:
        return json.loads(self.out)

    @property
    def first(self) -> str:
        return self.out.splitlines()[0]


def oomph(*arguments: str) -> Result:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run(arguments)
    return Result(code=code, out=out.getvalue(), err=err.getvalue())


def refused(result: Result, *words: str) -> bool:
    """Whether it is a usage error: nothing on stdout, and these words in stderr's last line."""
    assert (result.code, result.out) == (2, "")
    assert "Traceback" not in result.err
    last = result.err.splitlines()[-1]
    assert last.startswith("oomph: ")
    return all(word in last for word in words)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("factory") / "mine.py"
    file.write_text(FACTORY)
    return str(file)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> str:
    """The config of a GPT-2 with one block and a hundred positions."""
    file = tmp_path_factory.mktemp("config") / "config.json"
    shape = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 50, "n_positions": 100}
    file.write_text(json.dumps({"model_type": "gpt2", **shape}))
    return str(file)


@pytest.fixture(scope="module")
def saving(file, tmp_path_factory) -> tuple[Result, str]:
    """A budget that takes techniques to stay in, and the file the plan is saved in."""
    path = str(tmp_path_factory.mktemp("plan") / "plan.json")
    command = ("plan", "--model", f"{file}:make", "--gpu", "cpu", "--budget", "3MiB")
    return oomph(*command, "--save", path), path


@pytest.fixture
def saved(saving) -> str:
    return saving[1]


def test_help_needs_no_torch() -> None:
    script = (
        "import sys; from oomph.cli import run; run(['plan', '--help']); run(['train', '--help']); "
        "sys.exit(f'imported {found}' if (found := {'torch', 'scipy'} & sys.modules.keys()) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--solve" in done.stdout
    assert "--steps" in done.stdout


# --- plan -------------------------------------------------------------------------------------


def test_the_first_line_is_the_verdict_and_tables_follow(saving) -> None:
    result, _ = saving
    assert result.code == 0
    assert result.first.startswith("fits: mine in 3.00 MiB on the CPU at ")
    assert " samples/s predicted, " in result.first
    assert " % of unlimited: " in result.first
    for title in ("What changes", "Predicted peak, of 3.00 MiB", "Alive at the predicted peak"):
        assert f"\n{title}" in result.out
    assert "hello" not in result.out


def test_the_json_is_the_plan_that_is_saved(file, tmp_path) -> None:
    path = tmp_path / "plan.json"
    result = oomph("plan", "--model", f"{file}:make", *AMPLE, "--json", "--save", str(path))
    assert result.code == 0
    answer = result.json()
    assert answer == json.loads(path.read_text())
    assert answer["verdict"] == "fits"
    assert answer.keys() >= {"made_for", "budget", "choices", "predicted", "changes", "fidelity"}


def test_where_no_plan_fits_the_first_line_has_the_smallest_budget(file, tmp_path) -> None:
    path = tmp_path / "plan.json"
    command = ("plan", "--model", f"{file}:make", "--gpu", "cpu", "--budget", "1MiB")
    result = oomph(*command, "--save", str(path))
    assert result.code == 3
    assert result.first.startswith("does not fit: mine on the CPU; no plan fits 1.00 MiB: ")
    assert not path.exists()


def test_the_smallest_budget_is_one_that_does(file) -> None:
    command = ("plan", "--model", f"{file}:make", "--gpu", "cpu", "--json", "--budget")
    refusal = oomph(*command, "1MiB")
    assert refusal.code == 3
    answer = refusal.json()
    assert answer["verdict"] == "does_not_fit"
    assert answer["budget"] == 2**20 < answer["smallest_budget"]
    assert oomph(*command, str(answer["smallest_budget"])).code == 0


@pytest.mark.parametrize(
    ("command", "host"),
    [
        (("plan", "--gpu", "rtx-4090", "--host", "64GiB"), "64GiB"),
        (("plan", "--gpu", "rtx-4090"), None),
        (("train", "--device", "cpu", "--host", "64GiB"), "64GiB"),
        (("train", "--device", "cpu"), 7),
    ],
)
def test_host_memory_is_what_is_given_or_what_is_free_where_it_trains(
    file, command, host, monkeypatch
) -> None:
    def refuse(*_, **options):
        raise HostTooSmall(f"{options['host']!r} is too little", 3, 5)

    monkeypatch.setattr("oomph.search.attempt.plan", refuse)
    monkeypatch.setattr("oomph.runs.run.free_host_memory", lambda *_: 7)
    result = oomph(*command, "--model", f"{file}:make")
    assert result.code == 3
    assert f"; {host!r} is too little" in result.first


def test_options_reach_the_planner(file) -> None:
    command = ("plan", "--model", f"{file}:flat", "--gpu", "rtx-4090", "--json")
    exact = oomph(*command, "--allow", "exact", "--no-compile", "--clip-norm", "1").json()
    assert exact["choices"]["precision"] == "fp32"
    assert not exact["choices"]["compiled"]
    assert not exact["choices"]["optimizer_in_backward"]
    assert exact["fidelity"] == "exact"
    rounded = oomph(*command, "--no-compile").json()
    assert rounded["choices"]["precision"] == "bf16-mixed"


def test_the_longest_sequence_with_a_plan(config) -> None:
    command = ("plan", "--model", config, "--batch", "1", "--seq", "64", *AMPLE)
    result = oomph(*command, "--solve", "seq")
    assert result.code == 0
    assert result.first.startswith("fits: up to a seq of 100, GPT2LMHeadModel in 64.00 MiB ")
    assert "Memory is not what limits it: a gpt2 of this config takes 100 tokens" in result.out


def test_the_best_of_the_cards_that_have_a_price(file, tmp_path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text('schema = 1\n[dollars_per_hour]\nt4 = 0.01\n"NVIDIA H200" = 100\n')
    answer = oomph(
        *("plan", "--model", f"{file}:flat", "--gpu", "any"),
        *("--prices", str(prices), "--json"),
    ).json()
    assert [card["name"] for card in answer["cards"]] == ["t4", "h200"]
    assert (answer["ranked_by"], answer["cheapest"], answer["unit"]) == ("cost", "t4", "samples")


# --- train ------------------------------------------------------------------------------------


def test_training_compares_with_the_prediction(file, saved) -> None:
    command = ("train", "--model", f"{file}:make", "--device", "cpu", "--plan", saved)
    result = oomph(*command)
    assert result.code == 0, result.err
    assert result.first.startswith("trained: mine, 10 steps on the CPU at ")
    assert "not measured on the CPU" in result.out
    assert "\n  a step " in result.out


def test_training_as_json(file) -> None:
    command = ("train", "--model", f"{file}:make", "--device", "cpu", "--budget", "64MiB")
    answer = oomph(*command, "--steps", "4", "--json").json()
    assert len(answer["losses"]) == len(answer["step_seconds"]) == answer["steps"] == 4
    assert answer["losses"][-1] < answer["losses"][0]
    assert answer["measured"]["peak"] is None
    assert answer["measured"]["seconds"] > 0
    assert answer["predicted"]["peak"]["allocated"] <= answer["plan"]["budget"] == 64 * 2**20


def test_a_saved_plan_is_used_and_gives_the_same_losses(file, saved) -> None:
    command = ("train", "--model", f"{file}:make", "--device", "cpu", "--steps", "2", "--json")
    lean = oomph(*command, "--plan", saved).json()
    ample = oomph(*command, "--budget", "64MiB").json()
    assert lean["plan"]["budget"] == 3 * 2**20
    assert lean["plan"]["choices"] != ample["plan"]["choices"]
    assert lean["losses"] == pytest.approx(ample["losses"], rel=1e-5)


def test_a_factory_may_bring_its_loader(file, saved) -> None:
    command = ("--device", "cpu", "--plan", saved, "--steps", "2", "--json")
    own = oomph("train", "--model", f"{file}:make", *command).json()
    loaded = oomph("train", "--model", f"{file}:loaded", *command).json()
    assert loaded["losses"][0] > own["losses"][0] * 2


def test_a_model_by_config_trains_on_random_tokens_from_initialised_weights(config) -> None:
    answer = oomph(
        *("train", "--model", config, "--batch", "2", "--seq", "16", "--steps", "2"),
        *("--device", "cpu", "--budget", "64MiB", "--json"),
    ).json()
    # ln 50 is what a model that knows nothing of 50 tokens loses.
    assert answer["losses"][0] == pytest.approx(3.912, abs=0.3)


def test_training_without_a_plan_that_fits_exits_with_3(file) -> None:
    result = oomph("train", "--model", f"{file}:make", "--device", "cpu", "--budget", "1MiB")
    assert result.code == 3
    assert result.first.startswith("does not fit: mine on the CPU; no plan fits 1.00 MiB")


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpu", "cpu"), "nothing limits a job on the CPU"),
        ((*AMPLE, "--allow", "anything"), "exact, rounding, lossy, not 'anything'"),
        ((*AMPLE, "--clip-norm", "0"), "a positive norm"),
        ((*AMPLE, "--save", "/no/such/folder/plan.json"), "there is no folder /no/such/folder"),
        (("--gpu", "any", "--save", "plan.json"), "one card, not any"),
        (("--gpu", "any", "--prices", "missing.toml"), "cannot read the prices 'missing.toml'"),
        ((*AMPLE, "--prices", "prices.toml"), "use it with --gpu any"),
        (("--gpu", "abacus"), "unknown GPU 'abacus'"),
        (("--host", "much"), "cannot read 'much' as memory"),
        ((*AMPLE, "--host", "1GiB"), "on the CPU host memory is the budget"),
        ((*AMPLE, "--solve", "depth"), "the largest batch or seq, not 'depth'"),
        ((*AMPLE, "--solve", "batch"), "makes its own batch; ask oomph.largest_planned"),
        (("--solve", "seq", "--gpu", "any"), "wants one card"),
    ],
)
def test_plans_that_cannot_be_meant_are_refused(file, arguments, words) -> None:
    assert refused(oomph("plan", "--model", f"{file}:make", *arguments), words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "nothing limits a job on the CPU"),
        (("--steps", "0", "--budget", "64MiB"), "--steps"),
        (("--device", "tpu"), "cpu or cuda, not 'tpu'"),
        (("--plan", "missing.json"), "cannot read the plan 'missing.json'"),
        (("--plan", "plan.json", "--budget", "1GiB"), "--plan has its own budget"),
        (("--plan", "plan.json", "--host", "1GiB"), "--plan has its own host"),
        (("--plan", "plan.json", "--no-compile", "--allow", "lossy"), "its own allow, no-compile"),
        (("--frobnicate",), "--frobnicate"),
    ],
)
def test_trainings_that_cannot_be_meant_are_refused(file, arguments, words) -> None:
    device = () if "--device" in arguments else ("--device", "cpu")
    assert refused(oomph("train", "--model", f"{file}:make", *device, *arguments), words)


def test_a_plan_for_another_model_is_stale(file, saved) -> None:
    command = ("train", "--model", f"{file}:wider", "--device", "cpu", "--plan", saved)
    result = oomph(*command)
    assert refused(result, "the plan is for a model of 132,352 parameters", "has other weights")


def test_a_truncated_plan_is_refused(file, saved, tmp_path) -> None:
    cut = tmp_path / "cut.json"
    whole = Path(saved).read_text()
    cut.write_text(whole[: len(whole) // 2])
    command = ("train", "--model", f"{file}:make", "--device", "cpu", "--plan")
    assert refused(oomph(*command, str(cut)), "is no plan, or only part of one")
    cut.write_text("[]")
    assert refused(oomph(*command, str(cut)), "is no plan")


def test_a_loader_with_longer_samples_than_planned_is_refused(file) -> None:
    command = ("train", "--model", f"{file}:longer", "--device", "cpu")
    result = oomph(*command, "--budget", "64MiB")
    assert refused(
        result, "the plan is for batches of up to (4, 64, 64), and this one is (4, 128, 64)"
    )
