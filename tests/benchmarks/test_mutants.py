"""Small changes to the code: which are made, and how it is found that a test notices one."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.affected import ROOT
from benchmarks.mutations import choose, find_mutations

CODE = '''
"""What this is for, with 1 or 2 numbers."""

def larger(x: int | None, y: int = 3) -> int:
    """Returns x if x > y."""
    if x is None:
        raise ValueError("no x, and 5 words")
    say(f"comparing {x + 1}")
    assert y > 2
    return x if x > y and not x < 0 else -y


def described(x: int) -> str:
    return f"{x} of " + "many"
'''


def test_a_mutation_is_another_program() -> None:
    for mutation in find_mutations(Path("larger.py"), CODE):
        changed = mutation.apply(CODE)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(CODE)), str(mutation)
        assert changed.splitlines()[mutation.line - 1] != CODE.splitlines()[mutation.line - 1]


def test_texts_annotations_and_checks_of_the_code_itself_are_left_alone() -> None:
    lines = {mutation.line for mutation in find_mutations(Path("larger.py"), CODE)}
    code = CODE.splitlines()
    assert {code[line - 1].split()[0] for line in lines} == {"def", "if", "return"}
    assert len(lines) == 3, "the first function's default, condition and result"


def test_the_same_seed_chooses_the_same_one_in_each_line() -> None:
    mutations = find_mutations(Path("larger.py"), CODE)
    chosen = choose(mutations, 10, seed=3)
    assert chosen == choose(mutations, 10, seed=3)
    assert len(chosen) == len({one.line for one in chosen}) == 3
    assert len(choose(mutations, 2, seed=3)) == 2


def test_a_run_finds_what_is_noticed_and_tries_again_only_what_was_not(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "benchmarks.mutants", "plans", "--seed", "2"]
    command += ["--count", "2", "--seconds", "3", "--out", str(out)]
    for _ in range(2):
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert "without a mutation" not in ended.stdout
    results = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    killed = [one for one in results if one["status"] == "killed"]
    survived = [one for one in results if one["status"] == "survived"]
    assert killed and all(one["by"].startswith("tests/plans/") for one in killed)
    assert len({one["mutation"] for one in results}) == 2
    assert len(results) == 2 + len(survived) / 2
