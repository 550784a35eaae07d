"""Shared by all commands: the app, exit codes, one-line errors, stdout with nothing but JSON."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console

from oomph.errors import OomphError
from oomph.quoting import printable
from oomph.report.report import Report
from oomph.report.text import print_report

SCHEMA_VERSION = 1
EXIT_CODES = {"fits": 0, "does_not_fit": 3, "inconclusive": 5}
USAGE, INTERNAL, INTERRUPTED = 2, 1, 130

app = typer.Typer(
    help="Makes any PyTorch model fit in the GPU memory you have, and says before you run that it"
    " will.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of `oomph` and `python -m oomph`."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; no exception leaves this function."""
    as_json = "--json" in _own_arguments(arguments)
    try:
        code = app(args=list(arguments) or ["--help"], prog_name="oomph", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except OomphError as error:
        return _refuse(str(error), USAGE, as_json)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader closed the pipe: `oomph gpus | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERNAL
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's own errors, for any version of click
            return _refuse(f"{error.format_message()} (see oomph --help)", USAGE, as_json)
        if os.environ.get("OOMPH_DEBUG") == "1":
            traceback.print_exc()
        message = f"internal error: {type(error).__name__}: {error}"
        hint = "please report it with the output of OOMPH_DEBUG=1"
        return _refuse(f"{message} ({hint})", INTERNAL, as_json)


def _own_arguments(arguments: Sequence[str]) -> Sequence[str]:
    """oomph's own arguments: those after a script belong to the script."""
    if {"rehearse", "run"} & set(arguments[:1]):
        return list(itertools.takewhile(lambda argument: not argument.endswith(".py"), arguments))
    return arguments


def _refuse(message: str, code: int, as_json: bool) -> int:
    """Print the message as one line on stderr; with --json also as an object on stdout."""
    line = printable(" ".join(message.split()))
    print(f"oomph: {line}", file=sys.stderr)
    if as_json:
        write_json({"schema_version": SCHEMA_VERSION, "error": line})
    return code


def _print_version(asked: bool) -> None:
    if asked:
        print(f"oomph {version('oomph')}")
        raise typer.Exit


@app.callback()
def oomph(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Say it and exit."),
    ] = False,
) -> None:
    """The options of no command in particular."""


class Answer(Protocol):
    """The result of a command."""

    @property
    def verdict(self) -> str:
        """A key of `EXIT_CODES`."""

    def as_dict(self) -> dict[str, Any]:
        """The answer as plain JSON."""


def answer(result: Answer, report: Report, as_json: bool) -> int:
    """Write an answer to stdout, and return its exit code."""
    if as_json:
        write_json(result.as_dict())
    else:
        print_report(report, Console())
    return EXIT_CODES[result.verdict]


def write_json(value: dict[str, Any]) -> None:
    """Write one object to stdout."""
    print(json.dumps(value, indent=2))


@contextlib.contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Keep stdout clean, and show a status line if stderr is a terminal.

    Yields a function that sets the status text.
    """
    console = Console(stderr=True)
    with clean_stdout():
        if not console.is_terminal:
            yield lambda _: None
            return
        with console.status(what) as status:
            yield status.update


@contextlib.contextmanager
def clean_stdout() -> Iterator[None]:
    """Keep libraries and users' files off stdout."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("torch").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        yield
