"""A second process that rehearses beside this one, if the machine has a core for it.

It is a fork, so it has the same job. It takes questions as JSON and answers in JSON, with numbers
and names alone. Whatever it does not answer, for any reason, is worked out in this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

#: Seconds after which a fork that is waited for and uses no CPU time is given up.
PATIENCE = 10.0

#: Works out the answer to a question; both are plain JSON, and None means no answer.
Work = Callable[[Any], Any]


class SecondProcess:
    """Answers questions in order; while it is busy it takes no new ones.

    So neither process ever blocks because the other has not read its pipe.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._child: _Child | None = None
        self._is_usable = may_fork()
        #: Questions not answered yet, as JSON, and the answers to others.
        self._open: deque[str] = deque()
        self._answers: dict[str, Any] = {}

    def ask(self, questions: Sequence[Any], *, instead: bool = False) -> None:
        """Have the new ones among these questions answered, if the child is idle.

        With `instead`, the child is stopped first if its current question is none of these.
        """
        self._listen()
        asked = [
            key for question in questions if (key := json.dumps(question)) not in self._answers
        ]
        if instead and self._open and asked and self._open[0] not in asked:
            self._end_child()
        if self._open or not asked or not self._is_usable:
            return
        if self._child is None:
            self._child = _Child(self._work)
        if self._child.tell(f"[{', '.join(asked)}]"):
            self._open += asked
        else:
            self._give_up()

    def answer(self, question: Any) -> Any:
        """The child's answer, once it has one; None if it was not asked or does not know."""
        key = json.dumps(question)
        self._listen(until=key)
        return self._answers.get(key)

    def comes_to_later(self, question: Any) -> bool:
        """Whether the child was asked this, but is busy with something else."""
        self._listen()
        return json.dumps(question) in list(self._open)[1:]

    def close(self) -> None:
        """End the child, whatever it is doing; the next question starts another."""
        self._end_child()
        self._answers.clear()

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.end()
        self._child = None
        self._open.clear()

    def _listen(self, until: str = "") -> None:
        """Read the available answers, and wait for this one."""
        while self._open and self._child is not None:
            line = self._child.hear(wait=until in self._open)
            if line is None:
                return
            answer = json.loads(line) if line else None
            if answer is None:
                self._give_up()
                return
            self._answers[self._open.popleft()] = answer

    def _give_up(self) -> None:
        """Stop using a child: what failed there once would fail again."""
        known = dict(self._answers)
        self.close()
        self._answers, self._is_usable = known, False


def may_fork() -> bool:
    """Whether a fork of this process can rehearse, and has a core to do so.

    A fork cannot use CUDA if this process does, and lacks its Python threads.
    """
    return (
        sys.platform == "linux"
        and len(os.sched_getaffinity(0)) > 1
        and threading.active_count() == 1
        and not torch.cuda.is_initialized()
    )


class _Child:
    """A fork that answers questions."""

    def __init__(self, work: Work) -> None:
        questions, self._to = os.pipe()
        self._from, answers = os.pipe()
        self._profiles = b""
        with warnings.catch_warnings():
            # Libraries have threads of their own, which are missing in a fork: see `_computed`.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if not self._pid:
            os.close(self._to)
            os.close(self._from)
            _serve(work, questions, answers)
        os.close(questions)
        os.close(answers)

    def tell(self, line: str) -> bool:
        """Send it a line of questions; False if it is gone."""
        rest = f"{line}\n".encode()
        try:
            while rest:
                rest = rest[os.write(self._to, rest) :]
        except OSError:
            return False
        return True

    def hear(self, *, wait: bool) -> bytes | None:
        """Its next line; empty if it ended or is stuck, None if there is none yet."""
        while b"\n" not in self._profiles:
            before = self._computed()
            if not select.select([self._from], [], [], PATIENCE if wait else 0)[0]:
                if not wait:
                    return None
                if self._computed() == before:
                    return b""
                continue
            more = os.read(self._from, 1 << 16)
            if not more:
                return b""
            self._profiles += more
        line, _, self._profiles = self._profiles.partition(b"\n")
        return line

    def _computed(self) -> str:
        """The CPU time it has used so far, in kernel ticks.

        A fork inherits libraries' locks as they were, but not the threads that held them.
        """
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return " ".join(fields[11:13])

    def end(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._to)
        os.close(self._from)


def _serve(work: Work, questions: int, answers: int) -> NoReturn:
    """Answer until the pipe closes; the fork never returns to the caller's code."""
    # Whatever happens, the end of the pipe tells the first process.
    with contextlib.suppress(BaseException):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the first process
        torch.set_num_threads(1)
        with open(questions) as asked, open(answers, "w") as written:
            for line in asked:
                for question in json.loads(line):
                    written.write(json.dumps(_try(work, question)) + "\n")
                    written.flush()
    os._exit(0)


def _try(work: Work, question: Any) -> Any:
    try:
        return work(question)
    except Exception:
        return None  # the first process will find the error and report it
