"""`--solve`: check the question, and set up the sizes to try."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from oomph.cli.options import ANY_GPU, JobOptions
from oomph.errors import BadInput

if TYPE_CHECKING:
    from oomph.jobs.job import Job

#: Sequence lengths are tried in multiples of this, which suit kernels and are commonly chosen.
SEQ_STEP = 64


def check_solvable(solve: str | None, options: JobOptions, gpu: str) -> None:
    """Refuse what `--solve` cannot answer, before anything is rehearsed."""
    if solve is None:
        return
    if solve not in ("batch", "seq"):
        raise BadInput(f"--solve finds the largest batch or seq, not {solve!r}")
    if gpu == ANY_GPU:
        raise BadInput("--solve wants one card, not any; `oomph gpus` lists them")
    if options.inputs:
        raise BadInput("--input fixes the batch that --solve is to vary; use one of them")
    if solve == "batch" and options.micro_batch is not None:
        raise BadInput(
            "the micro-batch decides the memory, not the batch: leave --micro-batch out, and what"
            " --solve batch finds is the largest micro-batch"
        )


def sizes(
    solve: str, options: JobOptions, say: Callable[[str], None], function: str
) -> dict[str, Any]:
    """The size to vary and its start, as arguments of `largest` and `largest_planned`.

    `function` is the Python function that errors suggest where the command line cannot answer.
    """
    from oomph.jobs.sources import default_shape, is_factory

    model = options.model
    if is_factory(model):
        raise BadInput(f"{model} makes its own batch; ask {function} from Python instead")

    def make_job(size: int) -> Job:
        say(f"rehearsing {model} with a {solve} of {size:,}")
        return options.job(**{solve: size})

    given = getattr(options, solve)
    return {
        "make_job": make_job,
        "what": solve,
        "start": given if given is not None else default_shape(model)[solve],
        "step": SEQ_STEP if solve == "seq" else 1,
    }
