"""Rehearses a user's own training script as it is: `oomph rehearse train.py …`.

The script runs as `__main__` in this process and believes it has the GPU. It is stopped after some
steps of its optimizer. Nothing is computed, nothing is written, and the process is restored
afterwards.
"""

from __future__ import annotations

import contextlib
import gc
import runpy
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from oomph.errors import BadInput, CannotRehearse, OomphError
from oomph.hardware import GPU, find_gpu
from oomph.process.rehearsal_threads import rehearsing
from oomph.rehearsal.allocator import AllocatorSettings
from oomph.rehearsal.checkpoints import hollow_checkpoints
from oomph.rehearsal.estimation import Estimate, judge
from oomph.rehearsal.files import private_files
from oomph.rehearsal.observing import SCRIPT_PHASES, EnoughSteps, Observer
from oomph.rehearsal.process import libraries_for_real, process_for
from oomph.rehearsal.stand_ins import stand_ins
from oomph.rehearsal.timeline import Timeline
from oomph.rehearsal.world import pretend
from oomph.units import parse_bytes

#: Only the main thread has fake GPU tensors.
_OF_THREADS = "a thread of the script that ended with an error (only the main one has the GPU)"


def estimate_script(
    path: str | Path,
    args: Sequence[str] = (),
    *,
    gpu: str | GPU,
    budget: str | int | None = None,
    steps: int = 2,
    allocator: str | AllocatorSettings = "",
    stdout_to_stderr: bool = False,
) -> Estimate:
    """Predict the peak memory of a training script on a GPU, and say whether it fits the budget."""
    started = time.perf_counter()
    card = find_gpu(gpu) if isinstance(gpu, str) else gpu
    limit = parse_bytes(budget) if budget is not None else card.memory
    settings = AllocatorSettings.parse(allocator) if isinstance(allocator, str) else allocator
    timeline = rehearse_script(path, args, gpu=card, steps=steps, stdout_to_stderr=stdout_to_stderr)
    return judge(
        timeline,
        job=Path(path).name,
        gpu=card,
        budget=limit,
        settings=settings,
        phases=SCRIPT_PHASES,
        seconds=time.perf_counter() - started,
    )


def rehearse_script(
    path: str | Path,
    args: Sequence[str] = (),
    *,
    gpu: GPU,
    steps: int = 2,
    stdout_to_stderr: bool = False,
) -> Timeline:
    """Every allocation and free of a script on `gpu`, until it has made `steps` optimizer steps."""
    script = _check(Path(path))
    if steps < 1:
        raise BadInput(f"a rehearsal makes at least one optimizer step, not {steps}")
    notes: dict[str, None] = {}
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        rehearsal = enter(rehearsing())
        enter(process_for(script, args))
        if stdout_to_stderr:
            enter(contextlib.redirect_stdout(sys.stderr))
        enter(private_files())
        recorder = enter(pretend(gpu))
        recorder.one_device_only = True
        enter(libraries_for_real(script))
        enter(hollow_checkpoints(notes.setdefault))
        enter(stand_ins(notes.setdefault))
        observer = Observer(recorder, steps)
        with observer.watching():
            try:
                stopped = _run(script)
            except CannotRehearse as error:
                if rehearsal.died_of:
                    raise CannotRehearse(
                        f"{error}; {_OF_THREADS}: {rehearsal.died_of[0]}"
                    ) from error
                raise
        gc.collect()  # memory the script still held is freed here, not at some later moment
    made = f"{observer.steps_made} optimizer step{'' if observer.steps_made == 1 else 's'}"
    ending = f"stopped after {made}" if stopped else f"the script ended by itself after {made}"
    recorder.timeline.warnings += observer.warnings()
    recorder.timeline.warnings += [
        f"What {_OF_THREADS} would have done is not in what is predicted: {why}."
        for why in rehearsal.died_of
    ]
    recorder.timeline.notes += [ending, *notes, *observer.notes(), *recorder.values.notes()]
    return recorder.timeline


def _check(script: Path) -> Path:
    """The script's path, if Python can parse the file."""
    if script.is_dir():
        raise BadInput(f"{script} is a folder; name the script in it")
    if not script.is_file():
        raise BadInput(f"there is no file {script}")
    try:
        compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise BadInput(f"{script.name}:{error.lineno}: {error.msg}") from error
    except ValueError as error:
        raise BadInput(f"{script.name} is no Python script: {error}") from error
    except OSError as error:
        raise BadInput(f"cannot read {script}: {error.strerror}") from error
    return script


def _run(script: Path) -> bool:
    """Run the script as Python would; True if it was stopped, False if it ended by itself."""
    try:
        runpy.run_path(str(script), run_name="__main__")
    except EnoughSteps:
        return True
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            place = _place(leaving, script)
            raise CannotRehearse(f"{place} ended the script: exit {leaving.code}") from leaving
    except Exception as error:
        refusal = next((e for e in _chain(error) if isinstance(e, OomphError)), None)
        place = _place(error, script)
        if refusal is None:
            reason = str(error).strip().partition("\n")[0]
            message = f"{place} raised {type(error).__name__}: {reason}"
        elif place in str(refusal):
            message = str(refusal)
        else:
            message = f"{place}: {refusal}"
        raise CannotRehearse(message) from error
    return False


def _place(error: BaseException, script: Path) -> str:
    """The innermost line of the user's own files, and the script's line that led there."""
    folder = script.parent.resolve()
    lines = [
        (Path(frame.filename).resolve(), frame.lineno)
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    own = [line for line in lines if _is_own_file(line[0], folder)]
    if not own:
        return script.name
    file, number = own[-1]
    place = f"{file.relative_to(folder)}:{number}"
    called = [line for line in own if line[0] == script.resolve()]
    if file == script.resolve() or not called:
        return place
    return f"{place} (called in {script.name}:{called[-1][1]})"


def _is_own_file(file: Path, folder: Path) -> bool:
    library = {"site-packages", "dist-packages"} & set(file.parts)
    return file.is_relative_to(folder) and not library and not file.is_relative_to(_OOMPH)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


_OOMPH = Path(__file__).resolve().parents[1]
