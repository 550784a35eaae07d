"""`oomph run script.py …`: runs an unmodified script as Python would, and watches it."""

from __future__ import annotations

import runpy
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from oomph.errors import BadInput
from oomph.explaining.failure import is_out_of_memory
from oomph.explaining.meters import Meter
from oomph.explaining.oom_report import OomReport
from oomph.explaining.watching import watch

#: Exit code if the script ran out of memory: the same as for "does not fit".
OUT_OF_MEMORY = 3


def run_script(
    path: str | Path,
    args: Sequence[str] = (),
    *,
    report: str | Path | None = None,
    meter: Meter | None = None,
    tell: Callable[[OomReport], None] = lambda _: None,
) -> int:
    """Run a script to its end; returns its exit code, or `OUT_OF_MEMORY`.

    If memory runs out, `tell` is called with the report.
    """
    script = Path(path)
    if not script.is_file():
        raise BadInput(f"there is no script {script}")
    command = f"oomph rehearse --gpu {{gpu}} {shlex.join([str(script), *args])}"
    watching = watch(report=report, meter=meter, next_command=command)
    with _as_main(script, args):
        try:
            with watching:
                runpy.run_path(str(script), run_name="__main__")
        except SystemExit as leaving:
            return _exit_code(leaving)
        except Exception as error:
            _print_traceback(error)
            if watching.report is not None:
                tell(watching.report)
            return OUT_OF_MEMORY if is_out_of_memory(error) else 1
    return 0


@contextmanager
def _as_main(script: Path, args: Sequence[str]) -> Iterator[None]:
    """Set `sys.argv` and `sys.path` as `python script args` would."""
    folder = str(script.parent.resolve())
    with (
        mock.patch.object(sys, "argv", [str(script), *args]),
        mock.patch.object(sys, "path", [folder, *sys.path]),
    ):
        yield


def _exit_code(leaving: SystemExit) -> int:
    """The exit code of `sys.exit(…)` as in Python: None is 0, text goes to stderr and is 1."""
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code
    print(leaving.code, file=sys.stderr)
    return 1


def _print_traceback(error: BaseException) -> None:
    """Print it as Python would, without the frames that ran the script."""
    shown = error.__traceback__
    while shown is not None and _is_around(shown.tb_frame.f_code.co_filename):
        shown = shown.tb_next
    traceback.print_exception(type(error), error, shown or error.__traceback__)


def _is_around(file: str) -> bool:
    return file == __file__ or "runpy" in file
