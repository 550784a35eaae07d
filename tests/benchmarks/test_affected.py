"""`make check` runs the tests that concern a change."""

from __future__ import annotations

from benchmarks.affected import ROOT, affected, nearest_first


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


def concerning(module: str) -> list[str]:
    found = nearest_first(ROOT / "src" / "oomph" / module)
    return [str(path.relative_to(ROOT / "tests")) for path in found]


def test_modules_of_an_inner_folder_are_mirrored_by_its_name_or_by_their_own() -> None:
    assert concerning("rehearsal/cuda/attention.py")[0] == "rehearsal/test_attention.py"
    assert concerning("rehearsal/allocator/driver.py")[0] == "rehearsal/test_allocator_driver.py"
    assert concerning("splitting/rules/views.py")[0] == "splitting/test_rules.py"


def test_a_mirror_may_be_several_files() -> None:
    assert concerning("techniques/host_optimizer.py")[:3] == [
        "techniques/test_host_optimizer.py",
        "techniques/test_host_optimizer_rehearsed.py",
        "techniques/test_host_optimizer_threads.py",
    ]


def test_after_those_come_tests_that_are_few_imports_away_and_speak_of_the_same() -> None:
    mirror, *others = concerning("search/solver.py")
    assert mirror == "search/test_solver.py"
    assert len(others) == len(set(others))
    assert others.index("search/test_planner.py") < others.index("techniques/test_registry.py")
    assert not any(path.startswith("gpu/") for path in others)
    assert "engine/test_transaction.py" in concerning("engine/optimizer_pieces.py")[:2]
