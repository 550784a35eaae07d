"""A training that is killed at any moment goes on from its last checkpoint, to the same losses."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.kills import (
    Server,
    Training,
    complaints,
    kill_many_times,
    last_step,
    undisturbed_losses,
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


def test_a_kill_right_before_any_change_of_the_disk_loses_nothing(
    server: Server, tmp_path: Path
) -> None:
    training = Training(server, tmp_path / "killed")
    training.start(stop_at=3)
    assert server.wait() == 0
    code, changes = -signal.SIGKILL, 0
    leftovers = set()
    while code == -signal.SIGKILL:
        changes += 1
        assert changes < 200, "a save never comes to its end"
        before = last_step(training.records())
        training.start(stop_at=before + 1, kill_at=changes)
        code = server.wait()
        leftovers |= {path.name for path in training.checkpoints.glob(".oomph-unfinished*")}
    assert code == 0
    # Four files, each opened and synced; folders made, synced, renamed; one checkpoint removed.
    assert changes > 20 and leftovers
    training.start(stop_at=last_step(training.records()) + 3)
    assert server.wait() == 0
    assert not list(training.checkpoints.glob(".oomph-unfinished*"))
    steps = last_step(training.records())
    undisturbed = undisturbed_losses(server, tmp_path / "undisturbed", steps)
    assert complaints(training.records(), undisturbed) == []


def test_random_kills_lose_nothing(server: Server, tmp_path: Path) -> None:
    result = kill_many_times(server, tmp_path, kills=25, seed=1)
    assert result.complaints == ()
    assert result.failed == 0
    assert result.kills == 25 and result.steps > 5


def test_losses_that_differ_and_checkpoints_that_are_lost_are_found() -> None:
    losses = ["0x1p+0", "0x1p+1"]
    well = ["begun 0", "step 1 0x1p+0", "saving 1", "saved 1", "begun 1", "step 2 0x1p+1"]
    assert complaints(well, losses) == []
    assert len(complaints([*well[:-1], "step 2 0x1p+0"], losses)) == 1
    assert len(complaints([*well[:4], "begun 0"], losses)) == 1
    assert complaints([*well[:3], "begun 0"], losses) == complaints([*well[:3], "begun 1"], losses)
