"""Options that several commands share, in groups.

A command takes a group as one argument; `with_groups` exposes its fields as options.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from oomph.jobs.job import Job

#: The card on which CUDA's rules were verified; used where only a budget is given.
DEFAULT_GPU = "h200"
ANY_GPU = "any"

AsJson = Annotated[bool, typer.Option("--json", help="Write one JSON object to stdout.")]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget", metavar="SIZE", help="Memory it may use, as 24GiB. Default: all of the GPU's."
    ),
]
HtmlOption = Annotated[
    str | None,
    typer.Option("--html", metavar="FILE", help="Write a report there that a browser shows."),
]
ExportOption = Annotated[
    list[str] | None,
    typer.Option(
        "--export",
        metavar="FILE",
        help="Write memory over time there: .csv, .json, .perfetto.json, or .pickle for"
        " pytorch.org/memory_viz. Repeatable.",
    ),
]
SolveOption = Annotated[
    str | None,
    typer.Option("--solve", metavar="WHAT", help="batch or seq: the largest that fits."),
]


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What to run: the model, its batch, and how it is trained."""

    model: Annotated[
        str,
        typer.Option(
            # Named explicitly, because some versions of typer would use the metavar as the name.
            "--model",
            metavar="MODEL",
            help="A name of `oomph models`, a config.json or its folder, or file.py:function.",
        ),
    ]
    batch: Annotated[int | None, typer.Option(help="Samples in a batch.")] = None
    seq: Annotated[
        int | None, typer.Option(help="Tokens of a sample; pixels of a side; samples of audio.")
    ] = None
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="NAME=SHAPE:DTYPE",
            help="In place of the sample batch, e.g. input_ids=4x2048:int64. Repeatable.",
        ),
    ] = None
    precision: Annotated[
        str | None, typer.Option(help="fp32, tf32, bf16-mixed, fp16-mixed or bf16.")
    ] = None
    optimizer: Annotated[
        str | None, typer.Option(help="As in torch.optim: adamw, adamw-fused, sgd-momentum …")
    ] = None
    micro_batch: Annotated[int | None, typer.Option(help="Samples per forward.")] = None
    checkpointing: Annotated[str | None, typer.Option(help="none or full.")] = None
    clip_norm: Annotated[
        float | None, typer.Option(help="The most the gradients' global norm may be.")
    ] = None

    def job(self, **shape: int) -> Job:
        """The job that the options describe, with another batch or seq if given."""
        from oomph.jobs.sources import job_from

        return job_from(**{**self.source(), **shape})

    def source(self) -> dict[str, Any]:
        """The arguments of `job_from` and `job_to_train`."""
        given = {
            name: getattr(self, name)
            for name in ("precision", "optimizer", "micro_batch", "checkpointing", "clip_norm")
            if getattr(self, name) is not None
        }
        shape = {"batch": self.batch, "seq": self.seq, "inputs": self.inputs or ()}
        return {"model": self.model, **shape, **given}


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Limits on what a plan may do."""

    allow: Annotated[
        str,
        typer.Option(
            "--allow",
            metavar="FIDELITY",
            help="How far its numbers may be from the job's: exact, rounding or lossy.",
        ),
    ] = "rounding"
    no_compile: Annotated[
        bool, typer.Option("--no-compile", help="Leave the blocks uncompiled.")
    ] = False
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            metavar="SIZE",
            help="Host memory that what leaves the GPU may take, as 64GiB; state, gradients,"
            " weights and what blocks save beyond it wait on the disk. Default: no limit; to train,"
            " what is free.",
        ),
    ] = None

    def as_arguments(self) -> dict[str, Any]:
        """The arguments of the planning functions."""
        return {
            "allow": self.allow,
            "compile_blocks": not self.no_compile,
            "host": self.host,
        }

    def changed(self) -> Iterable[str]:
        """The options that were given."""
        if self.allow != "rounding":
            yield "--allow"
        if self.no_compile:
            yield "--no-compile"
        if self.host is not None:
            yield "--host"


def with_groups(command: Callable[..., int]) -> Callable[..., int]:
    """Wrap a command so that the fields of each group become parameters of their own."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {
        name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)
    }
    shown: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            shown += _parameters(groups[name])
        else:
            kind = inspect.Parameter.KEYWORD_ONLY
            shown.append(parameter.replace(annotation=hints[name], kind=kind))

    @functools.wraps(command)
    def ungrouped(**given: Any) -> int:
        for name, group in groups.items():
            given[name] = group(**{f.name: given.pop(f.name) for f in dataclasses.fields(group)})
        return command(**given)

    ungrouped.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return ungrouped


def _parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hints[field.name],
            default=(
                inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
            ),
        )
        for field in dataclasses.fields(group)
    ]
