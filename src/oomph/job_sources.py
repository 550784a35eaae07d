"""Where a Job can come from besides Python objects: a name, a config.json, a factory in a file."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

from oomph.errors import BadInput
from oomph.job import Job, check_count
from oomph.models import (
    build_config,
    build_model,
    find_model,
    model_from_config_path,
    sample_batch,
    task_kind,
)


def job_from_name(
    name: str, *, batch: int | None = None, seq: int | None = None, **options: Any
) -> Job:
    """A job on a model of the catalogue; `options` are those of `Job` (precision, optimizer …)."""
    entry = find_model(name)
    size = check_count("the batch", batch if batch is not None else entry.batch)
    length = check_count("the sequence length", seq if seq is not None else entry.seq)
    make_batch = functools.partial(sample_batch, entry, build_config(entry), size, length)
    make_batch()  # says now, not during the rehearsal, that a sequence is too long
    return Job(functools.partial(build_model, entry), batch=make_batch, name=entry.name, **options)


def job_from_config(
    path: str | Path, *, batch: int = 1, seq: int | None = None, **options: Any
) -> Job:
    """A job on the model that a Hugging Face `config.json` (or its folder) describes."""
    cls, config = model_from_config_path(path)
    size = check_count("the batch", batch)
    length = check_count("the sequence length", seq if seq is not None else 512)
    make_batch = functools.partial(sample_batch, task_kind(cls, config), config, size, length)
    make_batch()
    return Job(
        functools.partial(build_model, config), batch=make_batch, name=cls.__name__, **options
    )


def job_from_factory(spec: str) -> Job:
    """The job that `file.py:function` returns. The file is the user's own and is executed."""
    file, _, function = spec.rpartition(":")
    path = Path(file)
    if not file or not function.isidentifier():
        raise BadInput(f"write a factory as file.py:function, not {spec!r}")
    if not path.is_file():
        raise BadInput(f"there is no file {file}")
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise BadInput(f"{file} failed to import: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent.resolve()))
    make = getattr(module, function, None)
    if not callable(make):
        raise BadInput(f"{file} has no function {function!r}")
    job = make()
    if not isinstance(job, Job):
        raise BadInput(f"{spec} returned {type(job).__name__}, not an oomph.Job")
    return job
