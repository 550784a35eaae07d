"""Kills a training at random moments, many times, and looks whether anything was lost.

    python -m benchmarks.kills [--kills 200] [--seed 0]

A small model with dropout trains on shuffled data and saves after every step. Its process is killed
with SIGKILL after a random time, in the middle of whatever it does, and another one goes on from
the newest checkpoint. Afterwards every loss of every process must be, to the bit, the loss that a
training has which nobody killed, and no process may have gone on from an older checkpoint than the
last one that was finished.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: The longest that a process lives, in seconds: a few steps.
LONGEST = 0.25


class Server:
    """Has imported everything, so that a training starts at once: as a fork of it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.kills", "--serve"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def start(self, **options: Any) -> int:
        """The id of a new process, with these options of `_train`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(options) + "\n")
        self._process.stdin.flush()
        return self._read()

    def wait(self) -> int:
        """The exit code of that process; negative for a signal."""
        return self._read()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.communicate(timeout=60)

    def _read(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the server that starts trainings has ended")
        return int(line)


class Training:
    """One training, of many processes; what each did is written down line by line.

    Also one that is killed leaves what it wrote.
    """

    def __init__(self, server: Server, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.checkpoints = folder / "checkpoints"
        self._server = server
        self._records = folder / "records"
        self._records.touch()

    def start(
        self, *, stop_at: int | None = None, kill_at: int | None = None, saves: bool = True
    ) -> int:
        """Go on from the newest checkpoint, up to a step; returns the process's id.

        With `kill_at` it kills itself right before that change of the file system.
        """
        return self._server.start(
            folder=str(self.checkpoints) if saves else None,
            records=str(self._records),
            stop_at=stop_at,
            kill_at=kill_at,
        )

    def records(self) -> list[str]:
        """What was done so far, by all processes."""
        return self._records.read_text().splitlines()


# -- what is looked for ----------------------------------------------------------------------------


def undisturbed_losses(server: Server, folder: Path, steps: int) -> list[str]:
    """The losses of a training that nobody kills and that saves nothing."""
    training = Training(server, folder)
    training.start(stop_at=steps, saves=False)
    if code := server.wait():
        raise RuntimeError(f"the training ended with {code}")
    return [loss for kind, _, loss in map(_words, training.records()) if kind == "step"]


def complaints(records: Sequence[str], undisturbed: Sequence[str]) -> list[str]:
    """What was lost or changed; nothing, if all is well."""
    found = []
    saved = saving = 0
    for kind, step, loss in map(_words, records):
        if kind == "saving":
            saving = step
        elif kind == "saved":
            saved = step
        elif kind == "begun" and step not in (saved, saving):
            found.append(f"a process began at step {step}, and the last checkpoint was of {saved}")
        elif kind == "begun":
            saved = step
        elif kind == "step" and loss != undisturbed[step - 1]:
            found.append(f"step {step} had the loss {loss}, and not {undisturbed[step - 1]}")
    return found


@dataclass(frozen=True, kw_only=True)
class Kills:
    """What came of killing a training."""

    kills: int
    while_saving: int
    while_starting: int
    steps: int
    failed: int
    """Processes that ended with an error of their own."""
    complaints: tuple[str, ...]

    def __str__(self) -> str:
        """The result in a line or two, and each complaint."""
        head = (
            f"{self.kills} kills, {self.while_saving} of them inside a save and"
            f" {self.while_starting} before the first step: {self.steps} steps,"
            f" {self.failed} processes failed, {len(self.complaints)} complaints"
        )
        return "\n".join([head, *self.complaints])


def kill_many_times(server: Server, folder: Path, kills: int, seed: int) -> Kills:
    """Kill so many processes of one training, then let it go on for five steps more."""
    draw = random.Random(seed)
    training = Training(server, folder / "killed")
    while_saving = while_starting = failed = 0
    for _ in range(kills):
        pid = training.start()
        time.sleep(draw.uniform(0, LONGEST))
        os.kill(pid, signal.SIGKILL)
        failed += server.wait() != -signal.SIGKILL
        last = _last_kind(training.records())
        while_saving += last == "saving"
        while_starting += last in ("", "started", "begun")
    goal = last_step(training.records()) + 5
    training.start(stop_at=goal)
    failed += server.wait() != 0
    records = training.records()
    found = complaints(records, undisturbed_losses(server, folder / "undisturbed", goal))
    if last_step(records) < goal:
        found.append(f"the last process came to step {last_step(records)} instead of {goal}")
    return Kills(
        kills=kills,
        while_saving=while_saving,
        while_starting=while_starting,
        steps=last_step(records),
        failed=failed,
        complaints=tuple(found),
    )


def _words(record: str) -> tuple[str, int, str]:
    kind, step, loss = [*record.split(), "0", ""][:3]
    return kind, int(step), loss


def _last_kind(records: Sequence[str]) -> str:
    return _words(records[-1])[0] if records else ""


def last_step(records: Sequence[str]) -> int:
    """The furthest that any process came."""
    return max((step for kind, step, _ in map(_words, records) if kind == "step"), default=0)


# -- the process that is killed --------------------------------------------------------------------


def _serve() -> None:
    """Fork a training for each line of the input; say its process's id, then its exit code."""
    import torch

    import oomph

    torch.set_num_threads(1)
    job, _ = _small_job()
    plan = oomph.plan(job, budget="1MiB", compile_blocks=False)
    with tempfile.TemporaryDirectory() as folder:  # what is only imported when it is used
        for steps in (1, 2):
            _train(plan, lambda _: None, Path(folder), steps, None)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _run_and_leave(plan, json.loads(line))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _run_and_leave(plan: Any, options: dict[str, Any]) -> None:
    """A fork must not go on with what its parent was doing."""
    code = 1
    try:
        records = os.open(options["records"], os.O_WRONLY | os.O_APPEND)
        _train(
            plan,
            lambda words: os.write(records, f"{words}\n".encode()),
            Path(options["folder"]) if options["folder"] else None,
            options["stop_at"],
            options["kill_at"],
        )
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _train(
    plan: Any,
    record: Callable[[str], Any],
    folder: Path | None,
    stop_at: int | None,
    kill_at: int | None,
) -> None:
    import torch

    from oomph.runs.checkpoint_folder import checkpoints
    from oomph.runs.run import apply

    record("started")
    job, loader = _small_job()
    run = apply(plan, job)
    batches = run.batches(loader)
    torch.manual_seed(1)
    if folder is not None and checkpoints(folder):
        run.load(folder)
    record(f"begun {run.steps}")
    if kill_at is not None:
        _kill_before_change(kill_at)
    while True:
        for batch in batches:
            loss = float(run.step(batch))
            record(f"step {run.steps} {loss.hex()}")
            if folder is not None:
                record(f"saving {run.steps}")
                run.save(folder)
                record(f"saved {run.steps}")
            if run.steps == stop_at:
                return


def _small_job() -> tuple[Any, Any]:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from oomph.jobs.job import Job

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, targets = torch.randn(28, 8), torch.randn(28, 1)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=4, shuffle=True)
    return Job(model, nn.MSELoss(), optimizer, (inputs[:4], targets[:4])), loader


def _kill_before_change(number: int) -> None:
    """From now on, count what changes the file system, and be killed right before that one."""
    left = number

    def count(event: str, _: Any = None) -> None:
        nonlocal left
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.fsync"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sync = os.fsync

    def counted_sync(descriptor: Any) -> None:
        count("os.fsync")
        sync(descriptor)

    sys.addaudithook(count)
    os.fsync = counted_sync  # type: ignore[assignment]  # it is not audited


def main() -> int:
    """Kill, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        _serve()
        return 0
    with tempfile.TemporaryDirectory() as folder, Server() as server:
        result = kill_many_times(server, Path(folder), options.kills, options.seed)
    print(result)
    return 1 if result.complaints or result.failed else 0


if __name__ == "__main__":
    sys.exit(main())
