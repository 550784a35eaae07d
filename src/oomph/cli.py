"""The command line. It parses and prints; what it answers comes from the modules it calls.

Nothing here imports torch before a command needs it: `oomph --help` answers at once.
"""

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
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from oomph.errors import BadInput, OomphError
from oomph.gpus import GPU, known_gpus
from oomph.models.catalogue import ModelEntry, known_models
from oomph.reporting.questions import describe_cards, describe_limit
from oomph.reporting.report import Report, Table, describe
from oomph.reporting.text import print_report, print_table
from oomph.units import format_bytes

if TYPE_CHECKING:
    from oomph.estimation import Estimate
    from oomph.job import Job
    from oomph.planning.cards import CardSurvey
    from oomph.planning.limits import Limit

SCHEMA_VERSION = 1
EXIT_CODES = {"fits": 0, "does_not_fit": 3, "inconclusive": 5}
USAGE, INTERNAL, INTERRUPTED = 2, 1, 130
#: The card that CUDA's rules were checked on; its rules are used where only a budget is given.
DEFAULT_GPU = "h200"
ANY_GPU = "any"
#: Sequence lengths are solved for in multiples of this, which kernels like and people choose.
SEQ_STEP = 64

app = typer.Typer(
    help="Makes any PyTorch model fit in the GPU memory you have, and says before you run that it"
    " will.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
AsJson = Annotated[bool, typer.Option("--json", help="Write one JSON object to stdout.")]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget", metavar="SIZE", help="Memory it may use, as 24GiB. Default: all of the GPU's."
    ),
]


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
    except BrokenPipeError:  # the reader has seen enough: `oomph gpus | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERNAL
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's own errors, whichever click it brings
            return _refuse(f"{error.format_message()} (see oomph --help)", USAGE, as_json)
        if os.environ.get("OOMPH_DEBUG") == "1":
            traceback.print_exc()
        message = f"internal error: {type(error).__name__}: {error}"
        hint = "please report it with the output of OOMPH_DEBUG=1"
        return _refuse(f"{message} ({hint})", INTERNAL, as_json)


def _own_arguments(arguments: Sequence[str]) -> Sequence[str]:
    """Those that are oomph's: what follows a rehearsed script is the script's."""
    if "rehearse" in arguments[:1]:
        return list(itertools.takewhile(lambda argument: not argument.endswith(".py"), arguments))
    return arguments


def _refuse(message: str, code: int, as_json: bool) -> int:
    """One line on stderr, whatever the message held; with --json an object on stdout too."""
    line = " ".join(message.split())
    print(f"oomph: {line}", file=sys.stderr)
    if as_json:
        _write_json({"schema_version": SCHEMA_VERSION, "error": line})
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


@app.command()
def estimate(
    model: Annotated[
        str,
        typer.Option(
            # Named although it is the parameter's name: some versions of typer take the metavar.
            "--model",
            metavar="MODEL",
            help="A name of `oomph models`, a config.json or its folder, or file.py:function.",
        ),
    ],
    batch: Annotated[int | None, typer.Option(help="Samples in a batch.")] = None,
    seq: Annotated[
        int | None, typer.Option(help="Tokens of a sample; pixels of a side; samples of audio.")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="NAME=SHAPE:DTYPE",
            help="In place of the sample batch, e.g. input_ids=4x2048:int64. Repeatable.",
        ),
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="fp32, tf32, bf16-mixed, fp16-mixed or bf16.")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="As in torch.optim: adamw, adamw-fused, sgd-momentum …")
    ] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Samples per forward.")] = None,
    checkpointing: Annotated[str | None, typer.Option(help="none or full.")] = None,
    gpu: Annotated[
        str,
        typer.Option(
            "--gpu",
            metavar="NAME",
            help="A card of `oomph gpus`, cpu, or any: which of the cards would hold it.",
        ),
    ] = DEFAULT_GPU,
    budget: BudgetOption = None,
    solve: Annotated[
        str | None,
        typer.Option("--solve", metavar="WHAT", help="batch or seq: the largest that fits."),
    ] = None,
    phase: Annotated[
        list[str] | None,
        typer.Option(help="build, first-step, step, eval or save. Repeatable; default: all."),
    ] = None,
    allocator: Annotated[
        str,
        typer.Option(
            "--allocator",
            metavar="OPTIONS",
            help='As PYTORCH_CUDA_ALLOC_CONF: "expandable_segments:True".',
        ),
    ] = "",
    as_json: AsJson = False,
) -> int:
    """Predict the peak memory of a training step, with no GPU.

    Exit codes: 0 fits, 3 does not fit, 5 inconclusive, 2 usage, 1 internal.
    """
    options = {
        "precision": precision,
        "optimizer": optimizer,
        "micro_batch": micro_batch,
        "checkpointing": checkpointing,
    }
    given = {name: value for name, value in options.items() if value is not None}
    if solve is not None:
        _check_solvable(solve, gpu=gpu, micro_batch=micro_batch, inputs=inputs)
    with _working(f"rehearsing {model}") as say:
        from oomph.estimation import estimate as predict
        from oomph.job_sources import job_from
        from oomph.planning.cards import survey_cards
        from oomph.rehearsal.phases import PHASES

        card = None if gpu == "cpu" else gpu
        under: dict[str, Any] = {
            "budget": budget,
            "phases": [name.replace("-", " ") for name in phase] if phase else PHASES,
            "allocator": allocator,
        }
        if solve is not None:
            limit = _solve(solve, model, {"batch": batch, "seq": seq, **given}, card, under, say)
        else:
            job = job_from(model, batch=batch, seq=seq, inputs=inputs or (), **given)
            if gpu == ANY_GPU:
                survey = survey_cards(job, **under)
            else:
                result = predict(job, card, **under)
    if solve is not None:
        return _answer(limit, describe_limit(limit), as_json)
    if gpu == ANY_GPU:
        return _answer(survey, describe_cards(survey), as_json)
    return _answer(result, describe(result), as_json)


def _check_solvable(
    solve: str, *, gpu: str, micro_batch: int | None, inputs: Sequence[str] | None
) -> None:
    if solve not in ("batch", "seq"):
        raise BadInput(f"--solve finds the largest batch or seq, not {solve!r}")
    if gpu == ANY_GPU:
        raise BadInput("--solve wants one card, not any; `oomph gpus` lists them")
    if inputs:
        raise BadInput("--input fixes the batch that --solve is to vary; use one of them")
    if solve == "batch" and micro_batch is not None:
        raise BadInput(
            "the micro-batch decides the memory, not the batch: leave --micro-batch out, and what"
            " --solve batch finds is the largest micro-batch"
        )


def _solve(
    solve: str,
    model: str,
    options: dict[str, Any],
    gpu: str | None,
    under: dict[str, Any],
    say: Callable[[str], None],
) -> Limit:
    from oomph.job_sources import default_shape, is_factory, job_from
    from oomph.planning.limits import largest

    if is_factory(model):
        raise BadInput(f"{model} makes its own batch; ask oomph.largest from Python instead")

    def make_job(size: int) -> Job:
        say(f"rehearsing {model} with a {solve} of {size:,}")
        return job_from(model, **{**options, solve: size})

    given = options[solve]
    return largest(
        make_job,
        gpu,
        what=solve,
        start=given if given is not None else default_shape(model)[solve],
        step=SEQ_STEP if solve == "seq" else 1,
        **under,
    )


@app.command(context_settings={"allow_interspersed_args": False})
def rehearse(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A training script, unmodified.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Passed to the script.")
    ] = None,
    gpu: Annotated[
        str, typer.Option("--gpu", metavar="NAME", help="The card the script shall believe in.")
    ] = DEFAULT_GPU,
    budget: BudgetOption = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps after which it is stopped.")] = 2,
    as_json: AsJson = False,
) -> int:
    """Predict the peak memory of a training script as it is, with no GPU.

    Options come before the script, the script's own arguments after it.

    What the script prints goes to stderr. Exit codes are those of estimate.
    """
    from oomph.rehearsal.script import estimate_script

    result = estimate_script(
        script, arguments or (), gpu=gpu, budget=budget, steps=steps, stdout_to_stderr=True
    )
    return _answer(result, describe(result), as_json)


@app.command()
def gpus(as_json: AsJson = False) -> None:
    """List the GPUs that are known by name."""
    if as_json:
        _write_json(
            {
                "schema_version": SCHEMA_VERSION,
                "gpus": {name: _gpu_as_dict(gpu) for name, gpu in known_gpus().items()},
            }
        )
        return
    print_table(
        Table(
            title="GPUs, with the makers' numbers: memory and host link in GB/s, dense TFLOP/s",
            header=("name", "architecture", "memory", "GB/s", "host", "fp32", "fp16", "fp8"),
            rows=tuple(
                (
                    gpu.name,
                    gpu.architecture,
                    format_bytes(gpu.memory),
                    f"{gpu.memory_bandwidth / 1e9:,.0f}",
                    f"{gpu.host_link / 1e9:.0f}",
                    *(_rate(gpu, dtype) for dtype in ("fp32", "fp16", "fp8")),
                )
                for gpu in known_gpus().values()
            ),
            text=("architecture",),
        ),
        Console(),
    )


@app.command()
def models(as_json: AsJson = False) -> None:
    """List the models that are known by name."""
    if as_json:
        _write_json(
            {
                "schema_version": SCHEMA_VERSION,
                "models": {name: _model_as_dict(model) for name, model in known_models().items()},
            }
        )
        return
    print_table(
        Table(
            title="Models, with the batch and length used where none is given",
            header=("name", "parameters", "batch", "seq", "trained as"),
            rows=tuple(
                (
                    model.name,
                    f"{model.parameters / 1e6:,.0f} M",
                    str(model.batch),
                    str(model.seq),
                    model.kind,
                )
                for model in known_models().values()
            ),
            text=("trained as",),
        ),
        Console(),
    )


def _answer(result: Estimate | Limit | CardSurvey, report: Report, as_json: bool) -> int:
    if as_json:
        _write_json(result.as_dict())
    else:
        print_report(report, Console())
    return EXIT_CODES[result.verdict]


@contextlib.contextmanager
def _working(what: str) -> Iterator[Callable[[str], None]]:
    """Keep libraries and users' files off stdout; show that something happens on a terminal.

    What it gives says what happens next.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("torch").setLevel(logging.ERROR)
    console = Console(stderr=True)
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        if not console.is_terminal:
            yield lambda _: None
            return
        with console.status(what) as status:
            yield status.update


def _write_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2))


def _rate(gpu: GPU, dtype: str) -> str:
    return f"{gpu.rates[dtype] / 1e12:,.0f}" if dtype in gpu.rates else "–"


def _gpu_as_dict(gpu: GPU) -> dict[str, Any]:
    capability = list(gpu.compute_capability) if gpu.compute_capability else None
    return {
        "vendor": gpu.vendor,
        "architecture": gpu.architecture,
        "compute_capability": capability,
        "sm_count": gpu.sm_count,
        "memory": gpu.memory,
        "memory_bandwidth": gpu.memory_bandwidth,
        "host_link": gpu.host_link,
        "rates": dict(gpu.rates),
        "aliases": list(gpu.aliases),
    }


def _model_as_dict(model: ModelEntry) -> dict[str, Any]:
    return {
        "model_class": model.model_class,
        "kind": model.kind,
        "parameters": model.parameters,
        "batch": model.batch,
        "seq": model.seq,
        "aliases": list(model.aliases),
    }
