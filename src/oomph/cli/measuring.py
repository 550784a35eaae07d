"""`oomph gpus measure`: measure the speed that this machine reaches."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from oomph.cli.app import SCHEMA_VERSION, working, write_json
from oomph.cli.options import AsJson
from oomph.report.profiles import describe_profile
from oomph.report.text import print_table


def measure(
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="DEVICE", help="cuda, cuda:1 or cpu. Default: the GPU."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long it may take, about.")] = 50.0,
    as_json: AsJson = False,
) -> None:
    """Measure this machine in under a minute, for the planner's clock."""
    with working("measuring") as say:
        from oomph.hardware.measuring import measure_machine
        from oomph.hardware.profile import save_profile

        profile = measure_machine(device=device, seconds=seconds, say=say)
        path = save_profile(profile)
    if as_json:
        write_json({"schema_version": SCHEMA_VERSION, "file": str(path), **profile.as_dict()})
        return
    console = Console()
    console.print(f"saved to {path}; plans for {profile.gpu} are timed by it", soft_wrap=True)
    print_table(describe_profile(profile), console)
