"""`oomph gpus` and `oomph models`: list the catalogues."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console

from oomph.cli.app import SCHEMA_VERSION, write_json
from oomph.cli.options import AsJson
from oomph.hardware import GPU, known_gpus
from oomph.jobs.models.catalogue import ModelEntry, known_models
from oomph.report.report import Table
from oomph.report.text import print_table
from oomph.units import format_bytes


def gpus(context: typer.Context, as_json: AsJson = False) -> None:
    """List the GPUs that are known by name, or measure the one there is."""
    if context.invoked_subcommand is not None:
        return
    if as_json:
        write_json(
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


def models(as_json: AsJson = False) -> None:
    """List the models that are known by name."""
    if as_json:
        write_json(
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
