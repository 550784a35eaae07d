"""Where a Job can come from besides Python objects: a name, a config.json, a factory in a file."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

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

MakeBatch = Callable[..., dict[str, Tensor]]

#: Where a config.json is given without a shape: it names none that it is usually trained with.
CONFIG_BATCH, CONFIG_SEQ = 1, 512


def job_from(
    model: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    inputs: Sequence[str] = (),
    **options: Any,
) -> Job:
    """A job from whichever `model` is: `file.py:function`, a config.json, its folder, or a name."""
    if is_factory(model):
        if batch is not None or seq is not None:
            raise BadInput(f"{model} makes its own batch; set its size and length there")
        if inputs:
            options["batch"] = functools.partial(_batch_of, inputs)
        return dataclasses.replace(job_from_factory(model), **options)
    if not _is_path(model):
        return job_from_name(model, batch=batch, seq=seq, inputs=inputs, **options)
    path = Path(model).expanduser()
    size = CONFIG_BATCH if batch is None else batch
    return job_from_config(path, batch=size, seq=seq, inputs=inputs, **options)


def is_factory(model: str) -> bool:
    """Whether it names a function in a file, which makes a job with a batch of its own."""
    return ".py:" in model or model.endswith(".py")


def default_shape(model: str) -> dict[str, int]:
    """The `batch` and `seq` that `job_from` takes for a name or config where none is given."""
    if _is_path(model):
        return {"batch": CONFIG_BATCH, "seq": CONFIG_SEQ}
    entry = find_model(model)
    return {"batch": entry.batch, "seq": entry.seq}


def _is_path(model: str) -> bool:
    """Whether it is a config.json or its folder, not a name."""
    return model.endswith(".json") or model.startswith((".", "/", "~")) or Path(model).is_dir()


def job_from_name(
    name: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    inputs: Sequence[str] = (),
    **options: Any,
) -> Job:
    """A job on a model of the catalogue; `options` are those of `Job` (precision, optimizer …).

    `inputs`, each like `input_ids=4x2048:int64`, take the place of the sample batch.
    """
    entry = find_model(name)
    size = check_count("the batch", batch if batch is not None else entry.batch)
    length = check_count("the sequence length", seq if seq is not None else entry.seq)
    make_batch: MakeBatch = functools.partial(_labelled_batch_of, inputs)
    if not inputs:
        make_batch = functools.partial(sample_batch, entry, build_config(entry), size, length)
    _try_out(make_batch)
    return Job(functools.partial(build_model, entry), batch=make_batch, name=entry.name, **options)


def job_from_config(
    path: str | Path,
    *,
    batch: int = CONFIG_BATCH,
    seq: int | None = None,
    inputs: Sequence[str] = (),
    **options: Any,
) -> Job:
    """A job on the model that a Hugging Face `config.json` (or its folder) describes."""
    cls, config = model_from_config_path(path)
    size = check_count("the batch", batch)
    length = check_count("the sequence length", seq if seq is not None else CONFIG_SEQ)
    make_batch: MakeBatch = functools.partial(_labelled_batch_of, inputs)
    if not inputs:
        make_batch = functools.partial(sample_batch, task_kind(cls, config), config, size, length)
    _try_out(make_batch)
    return Job(
        functools.partial(build_model, config), batch=make_batch, name=cls.__name__, **options
    )


def job_from_factory(spec: str) -> Job:
    """The job that `file.py:function` returns. The file is the user's own and is executed."""
    file, _, function = spec.rpartition(":")
    if not file or not function.isidentifier():
        raise BadInput(f"write a factory as file.py:function, not {spec!r}")
    make = getattr(_import_file(file), function, None)
    if not callable(make):
        raise BadInput(f"{file} has no function {function!r}")
    try:
        job = make()
    except (Exception, SystemExit) as error:
        raise BadInput(f"{spec} failed: {type(error).__name__}: {error}") from error
    if not isinstance(job, Job):
        raise BadInput(f"{spec} returned {type(job).__name__}, not an oomph.Job")
    return job


def _import_file(file: str) -> ModuleType:
    path = Path(file)
    if not path.is_file():
        raise BadInput(f"there is no file {file}")
    # A name of its own: a file called json.py must not take json's place.
    module_spec = importlib.util.spec_from_file_location(f"oomph_factory_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise BadInput(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module.__name__] = module  # dataclasses look their own module up
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        raise BadInput(f"{file} failed to import: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return module


def _try_out(make_batch: MakeBatch) -> None:
    """Say now, not during the rehearsal, that a batch is wrong; no memory is taken for it."""
    try:
        make_batch(device="meta")
    except RuntimeError as error:
        raise BadInput(f"no such batch can be made: {error}") from error


def _labelled_batch_of(specs: Sequence[str], device: str = "cpu") -> dict[str, Tensor]:
    batch = _batch_of(specs, device)
    if "labels" not in batch:
        raise BadInput(
            "without labels the model computes no loss; add an input such as labels=4x2048:int64"
        )
    return batch


def _batch_of(specs: Sequence[str], device: str = "cpu") -> dict[str, Tensor]:
    return dict(_named_tensor(spec, device) for spec in specs)


def _named_tensor(spec: str, device: str) -> tuple[str, Tensor]:
    """`input_ids=4x2048:int64` as a name and a tensor of ones."""
    match = re.fullmatch(r"(\w+)=(\d+(?:x\d+)*):(\w+)", spec.replace(" ", ""))
    if match is None:
        raise BadInput(f"write an input as name=shape:dtype, input_ids=4x2048:int64, not {spec!r}")
    name, sizes, dtype_name = match.groups()
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise BadInput(f"torch has no dtype {dtype_name!r}; write int64, float32, bool …")
    shape = [check_count(f"a size of {name}", int(size)) for size in sizes.split("x")]
    return name, torch.ones(shape, dtype=dtype, device=device)
