"""`oomph run`, `oomph explain` and `oomph compare`: why memory ran out, and where it went."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from oomph.cli.app import working, write_json
from oomph.cli.options import AsJson, HtmlOption
from oomph.cli.saving import check_files, save_html
from oomph.report.comparisons import describe_comparison
from oomph.report.explanations import describe_explanation
from oomph.report.findings import print_findings

if TYPE_CHECKING:
    from oomph.explaining.oom_report import OomReport

#: Memory grew above the threshold of `oomph compare --fail-above`.
REGRESSED = 4


def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A training script, unmodified.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Passed to the script.")
    ] = None,
    report: Annotated[
        str | None,
        typer.Option(
            "--report", metavar="FILE", help="Where to write why. Default: a private file."
        ),
    ] = None,
    html: HtmlOption = None,
) -> int:
    """Run a script as Python would; if memory runs out, say why.

    Options come before the script, the script's own arguments after it.

    The exit code is the script's; 3 if it ran out of memory, 1 if it raised another error.
    """
    from oomph.explaining.running import run_script

    check_files(html, None)

    def show(found: OomReport) -> None:
        from oomph.explaining.explanation import explain_values
        from oomph.report.page.sources import page_of_explanation

        save_html(html, lambda: page_of_explanation(explain_values(found.as_dict(), script)))
        if html is not None:
            print(f"oomph: the page is in {html}", file=sys.stderr)

    return run_script(script, arguments or (), report=report, tell=show)


def explain(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A memory snapshot, a profiler trace, or JSON of watch, estimate, plan or train.",
        ),
    ],
    html: HtmlOption = None,
    as_json: AsJson = False,
) -> int:
    """Say what a file about memory means. Nothing in it is run.

    Exit codes: 0 explained, 2 not such a file, 1 internal.
    """
    check_files(html, None)
    with working(f"reading {file}"):
        from oomph.explaining.explanation import explain as read
        from oomph.report.page.sources import page_of_explanation

        result = read(file)
        save_html(html, lambda: page_of_explanation(result))
    if as_json:
        write_json(result.as_dict())
    else:
        print_findings(describe_explanation(result), Console())
    return 0


def compare(
    before: Annotated[str, typer.Argument(metavar="A", help="A file that explain reads.")],
    after: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    fail_above: Annotated[
        str | None,
        typer.Option(
            "--fail-above",
            metavar="AMOUNT",
            help="2% or 512MiB: the exit code is 4 if B needs that much more than A.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Compare two files about memory: ledgers, categories, modules, the largest changes first.

    Exit codes: 0 compared, 4 grew more than --fail-above, 2 usage, 1 internal.
    """
    with working(f"comparing {before} and {after}"):
        from oomph.explaining.comparing import compare as hold_against

        result = hold_against(before, after, fail_above=fail_above)
    if as_json:
        write_json(result.as_dict())
    else:
        print_findings(describe_comparison(result), Console())
    return REGRESSED if result.regressed else 0
