"""One card shared by processes: they compile side by side, and stand still while one is timed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch._inductor.config

from oomph.memory.limits import host_limits

TIMED_OUT = "timed out"
OUT_OF_HOST_MEMORY = "out of host memory"
FAILED = "failed"

#: Device memory that processes may have together.
ROOM = 130 << 30
#: Host memory that is left when the last that was started is ended: the kernel would choose anyone.
HOST_RESERVE = 3 << 30

_ASKS, _LEAVES, _TELLS = range(3)


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A process's place beside the others."""

    pipe: Connection

    def tell(self, what: Any) -> None:
        """Give something to the task's `hear`, which runs where the tasks were given out."""
        self.pipe.send((_TELLS, what))

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else runs on the card or its host meanwhile."""
        self.pipe.send((_ASKS, None))
        self.pipe.recv()
        try:
            yield
        finally:
            self.pipe.send((_LEAVES, None))


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """Work for a process of its own."""

    needs: int
    """Device memory that it takes at most."""
    work: Callable[[Seat], None]
    hear: Callable[[Any], None]
    end: Callable[[dict[str, str]], None]
    """Is told how the work ended: a status and an error, nothing where it was done."""


@dataclass(eq=False)
class _Running:
    task: Task
    process: Any
    pipe: Connection
    until: float

    def send(self, number: signal.Signals) -> None:
        # To its group: a compiler's workers are processes too.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class SharedCard:
    """Runs tasks several at once while there is room for what they need, in their order."""

    def __init__(
        self,
        *,
        at_once: int,
        patience: float,
        deadline: float,
        room: int = ROOM,
        host_reserve: int = HOST_RESERVE,
    ) -> None:
        self._host_reserve = host_reserve
        self._at_once = at_once
        self._patience = patience
        self._deadline = deadline
        self._room = room
        self._running: list[_Running] = []
        self._asking: list[_Running] = []
        self._alone: _Running | None = None
        self._alone_since = 0.0

    def run(self, tasks: list[Task]) -> None:
        """Run what is in the list, and what is added to it meanwhile."""
        try:
            while tasks or self._running:
                if time.monotonic() > self._deadline:
                    return  # whatever is left is left for another time
                self._start_what_fits(tasks)
                pipes = {one.pipe: one for one in self._running}
                for pipe in wait(list(pipes), timeout=0.05):
                    self._listen(pipes[pipe])  # type: ignore[index]
                self._give_up_on_slow_ones()
                self._protect_the_host()
                self._let_the_next_be_alone()
        finally:
            for one in list(self._running):
                self._remove(one)

    def _start_what_fits(self, tasks: list[Task]) -> None:
        for task in list(tasks):
            used = sum(one.task.needs for one in self._running)
            fits = used + task.needs <= self._room or not self._running
            if fits and len(self._running) < self._at_once and self._alone is None:
                tasks.remove(task)
                self._start(task)

    def _start(self, task: Task) -> None:
        # Forked: libraries are loaded already.
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=_child, args=(task, theirs))
        process.start()
        theirs.close()
        assert process.pid is not None
        # Here as in the process itself, whoever comes first: it can be stopped from now on.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(process.pid, process.pid)
        until = time.monotonic() + self._patience
        self._running.append(_Running(task, process, ours, until))

    def _listen(self, one: _Running) -> None:
        try:
            kind, what = one.pipe.recv()
        except (EOFError, ConnectionError):
            one.process.join()
            code = one.process.exitcode
            ended = (
                {} if code == 0 else {"status": FAILED, "error": f"the process ended with {code}"}
            )
            self._remove(one)
            one.task.end(ended)
            return
        if kind == _ASKS:
            self._asking.append(one)
        elif kind == _LEAVES:
            self._leave()
        else:
            one.task.hear(what)

    def _let_the_next_be_alone(self) -> None:
        if self._alone is not None or not self._asking:
            return
        self._alone, self._alone_since = self._asking.pop(0), time.monotonic()
        for other in self._running:
            if other is not self._alone:
                other.send(signal.SIGSTOP)
        with contextlib.suppress(ConnectionError):
            self._alone.pipe.send(None)

    def _leave(self) -> None:
        self._alone = None
        stood = time.monotonic() - self._alone_since
        for one in self._running:
            one.until += stood
            one.send(signal.SIGCONT)

    def _give_up_on_slow_ones(self) -> None:
        for one in list(self._running):
            stands = self._alone is not None and one is not self._alone
            if not stands and time.monotonic() > one.until:
                self._remove(one)
                one.task.end({"status": TIMED_OUT})

    def _protect_the_host(self) -> None:
        if self._running and host_limits().memory < self._host_reserve:
            last = self._running[-1]
            self._remove(last)
            last.task.end({"status": OUT_OF_HOST_MEMORY})

    def _remove(self, one: _Running) -> None:
        one.send(signal.SIGKILL)
        one.process.join()
        one.pipe.close()
        self._running.remove(one)
        if one in self._asking:
            self._asking.remove(one)
        if one is self._alone:
            self._leave()


def _child(task: Task, pipe: Connection) -> None:
    os.setpgid(0, 0)
    warnings.simplefilter("ignore")
    # Several compile at once; each would take all cores.
    torch._inductor.config.compile_threads = 2
    task.work(Seat(pipe=pipe))
