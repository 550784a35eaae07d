"""The command line's questions: the largest that fits, and which cards would hold it."""

from __future__ import annotations

import contextlib
import io
import json

import pytest

from oomph import cli

FORWARD = ("--phase", "build", "--phase", "eval")


def oomph(*arguments: str) -> tuple[int, str, str]:
    """Run a command in this process: its exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run(("estimate", "--model", "gpt2", *arguments))
    return code, out.getvalue(), err.getvalue()


def test_the_largest_batch_is_the_first_line() -> None:
    code, out, err = oomph("--solve", "batch", "--seq", "64", "--budget", "3GiB", *FORWARD)
    assert code == 0
    first, second, *_ = out.splitlines()
    assert first.startswith("fits: up to a batch of ")
    assert second.startswith("A batch of ")
    assert "of a budget of 3.00 GiB on h200" in first
    assert err == ""


def test_the_longest_sequence_as_json() -> None:
    arguments = ("--solve", "seq", "--batch", "1", "--gpu", "t4", "--json")
    code, out, _ = oomph(*arguments, *FORWARD)
    solve = json.loads(out)["solve"]
    assert code == 0
    assert (solve["what"], solve["value"], solve["limited_by"]) == ("seq", 1024, "model")
    assert solve["next"] is None


def test_where_nothing_fits_the_exit_code_is_3() -> None:
    code, out, _ = oomph("--solve", "batch", "--seq", "64", "--budget", "200MiB", *FORWARD)
    assert code == 3
    assert out.startswith("does not fit: not even with a batch of 1, ")


def test_any_card_as_text_and_as_json() -> None:
    command = ("--gpu", "any", "--batch", "1", "--seq", "64", "--phase", "build")
    code, out, _ = oomph(*command)
    assert code == 0
    assert out.startswith("fits: on ")
    code, out, _ = oomph(*command, "--json", "--budget", "100MiB")
    assert code == 3
    assert {card["verdict"] for card in json.loads(out)["cards"]} == {"does_not_fit"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--solve", "depth"), "the largest batch or seq, not 'depth'"),
        (("--solve", "seq", "--gpu", "any"), "wants one card"),
        (("--solve", "batch", "--input", "input_ids=1x8:int64"), "--input fixes the batch"),
        (("--solve", "batch", "--micro-batch", "2"), "leave --micro-batch out"),
        (("--solve", "seq", "--seq", "2000"), "takes 1024 tokens, not 2000"),
        (("--solve", "batch", "--gpu", "cpu"), "nothing limits a job on the CPU"),
        (("--solve", "batch", "--model", "mine.py:make"), "ask oomph.largest from Python"),
    ],
)
def test_questions_that_cannot_be_meant_are_refused(arguments, words) -> None:
    code, out, err = oomph(*arguments)
    assert (code, out) == (2, "")
    assert words in err
