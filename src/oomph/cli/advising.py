"""`oomph advise`: the costs of an architecture, and changes that would reduce them."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from oomph.cli.app import working, write_json
from oomph.cli.options import DEFAULT_GPU, AsJson, JobOptions, with_groups
from oomph.report.advice import describe_advice
from oomph.report.findings import print_findings


@with_groups
def advise(
    options: JobOptions,
    gpu: Annotated[
        str, typer.Option("--gpu", metavar="NAME", help="A card of `oomph gpus`, or cpu.")
    ] = DEFAULT_GPU,
    as_json: AsJson = False,
) -> int:
    """Say what the model's architecture costs and what would change it, with no GPU.

    Nothing is changed. Exit codes: 0 answered, 2 usage, 1 internal.
    """
    with working(f"rehearsing {options.model}"):
        from oomph.advising.advice import advise as look_for_advice

        result = look_for_advice(options.job(), gpu=None if gpu == "cpu" else gpu)
    if as_json:
        write_json(result.as_dict())
    else:
        print_findings(describe_advice(result), Console())
    return 0
