"""A second process that rehearses beside this one, where the machine has a core for it.

It is a fork: it has the job as it is here, takes questions as JSON and answers so, with numbers and
names alone. What it does not answer, for whatever reason, is worked out here.
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

#: Seconds after which a fork that was waited for, and computed nothing meanwhile, is given up.
PATIENCE = 10.0

#: Works out the answer to a question; both are plain JSON, and no answer is None.
Work = Callable[[Any], Any]


class SecondProcess:
    """Answers questions in their order; one that is still busy with others takes no new ones.

    So nobody ever waits for the other to read what was written.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._child: _Child | None = None
        self._is_usable = may_fork()
        #: Questions that are not answered yet, as JSON, and the answers to others.
        self._open: deque[str] = deque()
        self._answers: dict[str, Any] = {}

    def ask(self, questions: Sequence[Any], *, instead: bool = False) -> None:
        """Have those of them answered meanwhile that are not yet, if it has nothing else to do.

        Or `instead` of what it is busy with, which is given up if it is none of these.
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
        """What was asked for, once it is there; None where it was not, or nobody knows."""
        key = json.dumps(question)
        self._listen(until=key)
        return self._answers.get(key)

    def comes_to_later(self, question: Any) -> bool:
        """Whether it is asked that, and busy with something else."""
        self._listen()
        return json.dumps(question) in list(self._open)[1:]

    def close(self) -> None:
        """End it, whatever it is doing; the next question begins another one."""
        self._end_child()
        self._answers.clear()

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.end()
        self._child = None
        self._open.clear()

    def _listen(self, until: str = "") -> None:
        """Take in the answers that are there, and wait for this one."""
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
        """What failed there once would fail again."""
        known = dict(self._answers)
        self.close()
        self._answers, self._is_usable = known, False


def may_fork() -> bool:
    """Whether a fork of this process can rehearse, and has a core to do so.

    A card that is in use here cannot be used by a fork, and threads of Python would be missed.
    """
    return (
        sys.platform == "linux"
        and len(os.sched_getaffinity(0)) > 1
        and threading.active_count() == 1
        and not torch.cuda.is_initialized()
    )


class _Child:
    """A fork that answers."""

    def __init__(self, work: Work) -> None:
        questions, self._to = os.pipe()
        self._from, answers = os.pipe()
        self._heard = b""
        with warnings.catch_warnings():
            # Libraries have threads of their own, which are not there in a fork: see `_serve`.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if not self._pid:
            os.close(self._to)
            os.close(self._from)
            _serve(work, questions, answers)
        os.close(questions)
        os.close(answers)

    def tell(self, line: str) -> bool:
        """Give it a line of questions; False where it is not there any more."""
        rest = f"{line}\n".encode()
        try:
            while rest:
                rest = rest[os.write(self._to, rest) :]
        except OSError:
            return False
        return True

    def hear(self, *, wait: bool) -> bytes | None:
        """The next line of it; empty where it ended or stands still, None where there is none."""
        while b"\n" not in self._heard:
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
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        return line

    def _computed(self) -> str:
        """How long it computed so far, in ticks of the kernel's.

        A fork has the locks of libraries as they were, and none of the threads that had them.
        """
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return " ".join(fields[11:13])

    def end(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._to)
        os.close(self._from)


def _serve(work: Work, questions: int, answers: int) -> NoReturn:
    """Answer until nobody asks any more; nothing of what called this goes on in the fork."""
    # Whatever happens, the end of the pipe says it.
    with contextlib.suppress(BaseException):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # who interrupts means the first process
        torch.set_num_threads(1)
        with open(questions) as asked, open(answers, "w") as told:
            for line in asked:
                for question in json.loads(line):
                    told.write(json.dumps(_try(work, question)) + "\n")
                    told.flush()
    os._exit(0)


def _try(work: Work, question: Any) -> Any:
    try:
        return work(question)
    except Exception:
        return None  # what is wrong is found out, and said, in the first process
