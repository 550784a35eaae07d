"""`make check` runs the tests that concern a change."""

from __future__ import annotations

from benchmarks.affected import affected


def test_a_changed_test_is_run_itself() -> None:
    assert affected(["tests/test_units.py"]) == ["tests/test_units.py"]


def test_a_changed_module_is_tested_by_the_file_that_mirrors_it() -> None:
    assert affected(["src/oomph/search/solver.py"]) == ["tests/search/test_solver.py"]


def test_a_module_with_no_mirror_is_tested_where_it_is_imported() -> None:
    assert affected(["src/oomph/engine/out_of_memory.py"]) == ["tests/engine/test_transaction.py"]


def test_a_module_that_many_tests_import_is_left_to_all_tests() -> None:
    assert affected(["src/oomph/jobs/job.py"]) == ["tests/jobs/test_job.py"]
    assert affected(["src/oomph/rehearsal/recorder.py"]) == ["tests/rehearsal/test_recorder.py"]
    assert affected(["src/oomph/plans/fidelity.py"]) == []


def test_what_concerns_no_test_runs_none() -> None:
    assert affected(["Makefile", "src/oomph/gone.py", "tests/gone/test_gone.py"]) == []


def test_docs_are_held_against_what_commands_print() -> None:
    assert affected(["docs/runs.md"]) == ["tests/test_docs.py", "tests/test_readme.py"]
