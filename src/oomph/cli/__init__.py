"""The command line: it parses and prints, and other modules compute the answers.

Nothing here imports torch before a command needs it, so `oomph --help` is fast.
"""

import typer

from oomph.cli.advising import advise
from oomph.cli.app import app, main, run
from oomph.cli.catalogues import gpus, models
from oomph.cli.estimating import estimate, rehearse
from oomph.cli.explaining import compare, explain
from oomph.cli.explaining import run as run_watched
from oomph.cli.measuring import measure
from oomph.cli.planning import plan
from oomph.cli.training import train

__all__ = ["main", "run"]

# In the order that --help lists them.
app.command()(estimate)
app.command(context_settings={"allow_interspersed_args": False})(rehearse)
app.command()(plan)
app.command()(train)
app.command("run", context_settings={"allow_interspersed_args": False})(run_watched)
app.command()(explain)
app.command()(compare)
app.command()(advise)
gpus_app = typer.Typer(invoke_without_command=True, help=gpus.__doc__)
gpus_app.callback()(gpus)
gpus_app.command()(measure)
app.add_typer(gpus_app, name="gpus")
app.command()(models)
