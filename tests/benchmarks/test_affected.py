"""`make check` runs the tests that concern a change."""

from __future__ import annotations

from benchmarks.affected import ROOT, affected, nearest_tests


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


def found_for(module: str) -> list[list[str]]:
    found = nearest_tests(ROOT / "src" / "oomph" / module)
    return [[str(path.relative_to(ROOT / "tests")) for path in layer] for layer in found]


def test_modules_of_an_inner_folder_are_mirrored_by_its_name_or_by_their_own() -> None:
    assert found_for("rehearsal/cuda/attention.py")[0] == ["rehearsal/test_attention.py"]
    assert found_for("rehearsal/allocator/driver.py")[0] == ["rehearsal/test_allocator_driver.py"]
    assert "splitting/test_rules.py" in found_for("splitting/rules/views.py")[0]


def test_a_mirror_may_be_several_files() -> None:
    assert found_for("techniques/host_optimizer.py")[0] == [
        "techniques/test_host_optimizer.py",
        "techniques/test_host_optimizer_rehearsed.py",
        "techniques/test_host_optimizer_threads.py",
    ]


def test_after_those_come_tests_ever_more_imports_away_and_each_comes_once() -> None:
    mirror, importing, *further = found_for("search/solver.py")
    assert mirror == ["search/test_solver.py"]
    assert "search/test_option_profiles.py" in importing + further[0]
    everything = [path for layer in found_for("search/solver.py") for path in layer]
    assert len(everything) == len(set(everything))
    assert "search/test_planner.py" in everything
    assert not any(path.startswith("gpu/") for path in everything)
