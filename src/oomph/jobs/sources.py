"""Other sources of a Job than Python objects: a name, a config.json, a factory in a file."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from oomph.errors import BadInput
from oomph.jobs.job import Job, check_count
from oomph.jobs.models import find_model, sample_batch, task_kind, usual_length
from oomph.jobs.models.building import build_config, build_model, model_from_config_path

MakeBatch = Callable[..., dict[str, Tensor]]

#: Default batch for a config.json, which names none.
CONFIG_BATCH = 1


def job_from(
    model: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    inputs: Sequence[str] = (),
    **options: Any,
) -> Job:
    """A job from `file.py:function`, a config.json, its folder, or a name."""
    if is_factory(model):
        return _job_and_loader(model, batch, seq, inputs, options)[0]
    if not _is_path(model):
        return job_from_name(model, batch=batch, seq=seq, inputs=inputs, **options)
    path = Path(model).expanduser()
    size = CONFIG_BATCH if batch is None else batch
    return job_from_config(path, batch=size, seq=seq, inputs=inputs, **options)


def job_to_train(
    model: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    inputs: Sequence[str] = (),
    **options: Any,
) -> tuple[Job, Iterable[Any] | None]:
    """The job of `job_from` with initialised weights, and the data to train it on.

    The data is the loader that a factory returned beside its job, or None if it returned only a
    job; for a name or a config, it is random numbers.
    """
    if is_factory(model):
        return _job_and_loader(model, batch, seq, inputs, options)
    job = job_from(model, batch=batch, seq=seq, inputs=inputs, initialise=True, **options)
    if _is_path(model):
        config = model_from_config_path(Path(model).expanduser())[1]
    else:
        config = build_config(find_model(model))
    return job, _random_batches(job.batch, getattr(config, "vocab_size", None))


def _job_and_loader(
    spec: str,
    batch: int | None,
    seq: int | None,
    inputs: Sequence[str],
    options: dict[str, Any],
) -> tuple[Job, Iterable[Any] | None]:
    if batch is not None or seq is not None:
        raise BadInput(f"{spec} makes its own batch; set its size and length there")
    if inputs:
        options = {**options, "batch": functools.partial(_batch_of, inputs)}
    job, loader = _call_factory(spec)
    return dataclasses.replace(job, **options), loader


def _random_batches(make_batch: MakeBatch, vocabulary: int | None) -> Iterator[dict[str, Tensor]]:
    """Endless batches like the sample, with random numbers where any will do."""
    generator = torch.Generator().manual_seed(0)
    while True:
        batch = make_batch()
        # A batch of only tokens may have any of them; other integers have a meaning.
        tokens = batch.keys() == {"input_ids", "labels"} and vocabulary is not None
        tokens = tokens and batch["input_ids"].shape == batch["labels"].shape
        for leaf in batch.values():
            if leaf.is_floating_point():
                leaf.normal_(generator=generator)
            elif tokens:
                leaf.random_(0, vocabulary, generator=generator)
        yield batch


def is_factory(model: str) -> bool:
    """Whether it names a function in a file, which makes a job with its own batch."""
    return ".py:" in model or model.endswith(".py")


def default_shape(model: str) -> dict[str, int]:
    """The default `batch` and `seq` of `job_from` for a name or config."""
    if _is_path(model):
        cls, config = model_from_config_path(Path(model).expanduser())
        return {"batch": CONFIG_BATCH, "seq": usual_length(task_kind(cls, config), config)}
    entry = find_model(model)
    return {"batch": entry.batch, "seq": entry.seq}


def _is_path(model: str) -> bool:
    """Whether it is a config.json or its folder rather than a name."""
    return model.endswith(".json") or model.startswith((".", "/", "~")) or Path(model).is_dir()


def job_from_name(
    name: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    inputs: Sequence[str] = (),
    initialise: bool = False,
    **options: Any,
) -> Job:
    """A job on a model of the catalogue; `options` are those of `Job` (precision, optimizer …).

    `inputs`, each like `input_ids=4x2048:int64`, replace the sample batch. Only with `initialise`
    are the weights initialised when the model is really built.
    """
    entry = find_model(name)
    size = check_count("the batch", batch if batch is not None else entry.batch)
    length = check_count("the sequence length", seq if seq is not None else entry.seq)
    make_batch: MakeBatch = functools.partial(_labelled_batch_of, inputs)
    if not inputs:
        make_batch = functools.partial(sample_batch, entry, build_config(entry), size, length)
    _try_out(make_batch)
    build = functools.partial(build_model, entry, initialise=initialise)
    return Job(build, batch=make_batch, name=entry.name, **options)


def job_from_config(
    path: str | Path,
    *,
    batch: int = CONFIG_BATCH,
    seq: int | None = None,
    inputs: Sequence[str] = (),
    initialise: bool = False,
    **options: Any,
) -> Job:
    """A job on the model described by a Hugging Face `config.json` (or its folder)."""
    cls, config = model_from_config_path(path)
    size = check_count("the batch", batch)
    if seq is not None:
        check_count("the sequence length", seq)
    make_batch: MakeBatch = functools.partial(_labelled_batch_of, inputs)
    if not inputs:
        kind = task_kind(cls, config)
        length = seq if seq is not None else usual_length(kind, config)
        make_batch = functools.partial(sample_batch, kind, config, size, length)
    _try_out(make_batch)
    build = functools.partial(build_model, config, initialise=initialise)
    return Job(build, batch=make_batch, name=cls.__name__, **options)


def job_from_factory(spec: str) -> Job:
    """The job that `file.py:function` returns. The file is the user's own and is executed."""
    return _call_factory(spec)[0]


def _call_factory(spec: str) -> tuple[Job, Iterable[Any] | None]:
    """Call a factory, which returns a job, or a job and an iterable of batches to train it on."""
    file, _, function = spec.rpartition(":")
    if not file or not function.isidentifier():
        raise BadInput(f"write a factory as file.py:function, not {spec!r}")
    make = getattr(_import_file(file), function, None)
    if not callable(make):
        raise BadInput(f"{file} has no function {function!r}")
    try:
        made = make()
    except (Exception, SystemExit) as error:
        raise BadInput(f"{spec} failed: {type(error).__name__}: {error}") from error
    job, loader = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(job, Job):
        raise BadInput(f"{spec} returned {type(made).__name__}, not an oomph.Job")
    if loader is not None and not isinstance(loader, Iterable):
        raise BadInput(
            f"{spec} returned a job and {type(loader).__name__}, which is no iterable of batches"
        )
    return job, loader


def _import_file(file: str) -> ModuleType:
    path = Path(file)
    if not path.is_file():
        raise BadInput(f"there is no file {file}")
    # A unique name: a file called json.py must not replace json.
    module_spec = importlib.util.spec_from_file_location(f"oomph_factory_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise BadInput(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module.__name__] = module  # dataclasses look up their own module
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
    """Report a wrong batch now rather than during the rehearsal; allocates no memory."""
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
    """Parse `input_ids=4x2048:int64` to a name and a tensor of ones."""
    match = re.fullmatch(r"(\w+)=(\d+(?:x\d+)*):(\w+)", spec.replace(" ", ""))
    if match is None:
        raise BadInput(f"write an input as name=shape:dtype, input_ids=4x2048:int64, not {spec!r}")
    name, sizes, dtype_name = match.groups()
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise BadInput(f"torch has no dtype {dtype_name!r}; write int64, float32, bool …")
    shape = [check_count(f"a size of {name}", int(size)) for size in sizes.split("x")]
    return name, torch.ones(shape, dtype=dtype, device=device)
