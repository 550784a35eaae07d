"""Apply: give a model and its optimizer what a plan chose, and take it back (rule 4)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oomph.engine.module_copies import watch_copies
from oomph.engine.optimizer_pieces import OptimizerPieces
from oomph.engine.step import Stage
from oomph.errors import BadInput
from oomph.jobs.job import Job
from oomph.jobs.preexisting_settings import put_aside
from oomph.memory.disk_store import NumberedDiskStore
from oomph.memory.link import Link
from oomph.memory.numbered_store import NumberedStore
from oomph.memory.open_link import open_link
from oomph.memory.scratch_file import default_folder
from oomph.plans.choices import (
    KEEP,
    Choices,
    offloaded_tensors,
    on_the_gpu,
    saved_ops,
)
from oomph.plans.techniques import Settings, Target
from oomph.techniques.autocast import make_scaler, use_tf32
from oomph.techniques.chunked_loss import chunk_loss
from oomph.techniques.compiled_blocks import compile_block
from oomph.techniques.cuda_graph import Capture, capture_on_the_card
from oomph.techniques.disk_weights import OnDisk
from oomph.techniques.drop_paths import drop_paths, rate_as_tensor
from oomph.techniques.gradient_hooks import why_whole_for_hooks
from oomph.techniques.host_optimizer import HostOptimizer
from oomph.techniques.host_placement import HostPlacement
from oomph.techniques.master_weights import MasterWeights
from oomph.techniques.micro_batch import Weigher, why_whole
from oomph.techniques.offload_activations import ActivationOffload
from oomph.techniques.optimizer_in_backward import OptimizerInBackward
from oomph.techniques.optimizer_twin import is_elementwise
from oomph.techniques.placing import PlacedWeights, move_training
from oomph.techniques.recompute import recompute
from oomph.techniques.step_buckets import bucket_bytes, cuts_of
from oomph.techniques.technique import (
    ApplyContext,
    Undo,
    apply_techniques,
    find_module,
    staying,
    techniques_of,
    whole_technique,
)

#: Compiles a block whose recompute choice is given; a rehearsal has a stand-in for it.
Compile = Callable[[nn.Module, str], Undo]

_MARK = "_oomph_applied"


#: Opens slots on the disk behind a link: bytes of the largest, and how many buffers there are.
OpenStoreBehind = Callable[[Link, int, int], NumberedStore]


def apply_choices(
    choices: Choices,
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    device_type: str,
    compile_with: Compile | None = None,
    capture_with: Capture = capture_on_the_card,
    link_with: Callable[[str], Link] = open_link,
    store_with: OpenStoreBehind | None = None,
) -> tuple[Stage, Undo]:
    """Change model and optimizer in place; whatever fails, they are as they were before."""
    applied = Applied(
        choices,
        job,
        model,
        optimizer,
        device_type=device_type,
        compile_with=compile_with,
        capture_with=capture_with,
        link_with=link_with,
        store_with=store_with,
    )
    return applied.stage, applied.undo


class Applied:
    """A model and its optimizer under choices that can be switched while they train.

    What numbers are made of lasts: precision, weights, the optimizer's state. How they are computed
    can be switched: the size of micro-batches, what is recomputed, when the optimizer steps.
    """

    def __init__(
        self,
        choices: Choices,
        job: Job,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        device_type: str,
        compile_with: Compile | None = None,
        capture_with: Capture = capture_on_the_card,
        link_with: Callable[[str], Link] = open_link,
        store_with: OpenStoreBehind | None = None,
        disk: Path | None = None,
    ) -> None:
        refuse_applied(model)
        _check_whole(choices, job, model)
        self.choices = choices
        self.stage = Stage(
            job=_planned(job, choices),
            model=model,
            optimizer=optimizer,
            device_type=device_type,
            scaler=make_scaler(choices.precision, device_type),
            weigher=Weigher(job.normalizer),
            own_micro_batch=job.micro_batch,
            returns_loss=True,
        )
        self.job = job
        self._compile_with = compile_with
        self._capture_with = capture_with
        self._link_with = link_with
        self._store_with = store_with or functools.partial(_open_store, disk)
        self._link: Link | None = None
        #: By where to: what blocks save.
        self._offloads: dict[str, ActivationOffload] = {}
        self._placed: PlacedWeights | None = None
        #: What is applied of what can be switched, in this order.
        self._parts: dict[_Part, Undo] = {}
        self._undos = self._apply()

    def _apply(self) -> contextlib.ExitStack:
        choices, model, optimizer = self.choices, self.stage.model, self.stage.optimizer
        assert optimizer is not None
        parts = _parts(choices)
        with contextlib.ExitStack() as undos:
            do = undos.callback
            setattr(model, _MARK, True)
            do(delattr, model, _MARK)
            do(watch_copies(model, self.stage.settle))
            do(put_aside(model))
            do(self._close_link)
            do(self._change_parts, ())
            self._change_parts([part for part in parts if part.comes_first])
            if choices.precision == "tf32":
                do(use_tf32())
            if choices.optimizer_on == "gpu":
                do(move_training(model, optimizer, self._device()))
            masters = None
            if choices.weights != "own":
                masters = MasterWeights(model, optimizer)
                do(masters.undo)
            self.stage.masters = masters
            do(apply_techniques(self._context(choices)))
            if choices.optimizer_on == "host":
                do(self._place_weights(choices))
            self.stage.pieces = OptimizerPieces(optimizer, masters)
            do(self._change_parts, ())  # those of modules go before what lasts
            self._change_parts(parts)
            if choices.optimizer_on == "host":
                do(self._move_optimizer(choices))
            return undos.pop_all()

    def _context(self, choices: Choices) -> ApplyContext:
        assert self.stage.optimizer is not None
        return ApplyContext(
            model=self.stage.model,
            optimizer=self.stage.optimizer,
            device_type=self.stage.device_type,
            choices=choices,
            stage=self.stage,
            capture=self._capture_with,
        )

    @contextlib.contextmanager
    def taken_back(self) -> Iterator[None]:
        """While active, model and optimizer are as they were; then all is applied again.

        Refused before anything is changed where host memory has no room for what is on the disk.
        Loss scaler and all else that the stage learned stay. A technique that does not come back as
        it was must not be taken back on the way.
        """
        assert not staying(self.choices)
        if self.stage.host is not None:
            self.stage.host.check_undo()
        self._undos.close()
        try:
            yield
        finally:
            self._undos = self._apply()

    def switch(self, choices: Choices) -> None:
        """Compute in another way from the next step on; all that was learned stays as it is.

        Where that fails, the choices so far go on being applied.
        """
        if choices.fixed_part != self.choices.fixed_part:
            raise BadInput(
                "precision, weights, compiling and the optimizer's state cannot be switched while"
                " a run goes on; undo it and apply the plan"
            )
        _check_whole(choices, self.job, self.stage.model)
        try:
            self._change_parts(_parts(choices))
        except BaseException:
            self._change_parts(_parts(self.choices))
            raise
        self.choices = choices
        self.stage.job = _planned(self.job, choices)

    def undo(self) -> None:
        """Model and optimizer as they were, but for what they learned."""
        self._undos.close()

    def _change_parts(self, wanted: Sequence[_Part]) -> None:
        """Take back what is not wanted, then add what is missing."""
        changed = {part for part in self._parts if part not in wanted}
        changed |= {part for part in wanted if part not in self._parts}
        changed |= _around(changed, self._parts)
        for part in [part for part in reversed(self._parts) if part in changed]:
            self._parts.pop(part)()
        self._close_offloads(but={part.where for part in wanted})
        for part in wanted:
            if part not in self._parts:
                with contextlib.ExitStack() as undos:
                    self._apply_part(part, undos.callback)
                    self._parts[part] = undos.pop_all().close

    def _apply_part(self, part: _Part, do: Callable[[Undo], Any]) -> None:
        if part.settings is not None:
            do(whole_technique(part.technique).apply(part.settings, self._context(self.choices)))
            return
        if part.technique == _IN_BACKWARD:
            self._step_in_backward(do)
            return
        if part.technique == _AWAY:
            assert self._placed is not None and self._placed.streamed is not None
            do(self._placed.streamed.wrap())
            return
        module = find_module(self.stage.model, part.path)
        if part.technique == _HEAD:
            if not isinstance(module, nn.Linear):
                raise BadInput(f"the plan's head {part.path} is no linear layer of this model")
            do(chunk_loss(module, int(part.how)))
        elif part.technique == _OFFLOADED:
            do(self._offload_block(module, part))
        else:
            self._apply_to_block(part, module, do)

    def _apply_to_block(self, part: _Part, module: nn.Module, do: Callable[[Undo], Any]) -> None:
        how, compiled = part.how, part.technique == _COMPILED
        if compiled:
            for drop_path in drop_paths(module):
                do(rate_as_tensor(drop_path, self._device()))
        if self._compile_with is not None and compiled:
            do(self._compile_with(module, how))
            return
        if how != KEEP:
            do(recompute(module, saved_ops(how), compiled=compiled, name=part.path))
        if compiled:
            do(compile_block(module))

    def _open_link(self) -> Link:
        if self._link is None:
            self._link = self._link_with(self.stage.device_type)
        return self._link

    def _close_link(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = None

    def _offload_block(self, module: nn.Module, part: _Part) -> Undo:
        if part.where not in self._offloads:
            link = self._open_link()
            disk = functools.partial(self._store_with, link) if part.where == "disk" else None
            self._offloads[part.where] = ActivationOffload(
                link, self.stage.model, device_type=self.stage.device_type, disk=disk
            )
        return self._offloads[part.where].wrap(module, offloaded_tensors(part.how))

    def _close_offloads(self, but: Collection[str]) -> None:
        """Give back what blocks took outside the GPU, but for the places that they still go to."""
        for where in self._offloads.keys() - but:
            self._offloads.pop(where).undo()

    def _device(self) -> torch.device:
        """Where the model runs, wherever it is now."""
        stage = self.stage
        there = [p.device for p in stage.model.parameters() if p.device.type == stage.device_type]
        return there[0] if there else torch.device(stage.device_type)

    def _place_weights(self, choices: Choices) -> Undo:
        """Weights go to the GPU one by one; those of some blocks to the host or to the disk."""
        on_disk = None
        if choices.weights_away_on == "disk":
            on_disk = OnDisk(
                blocks=choices.weights_away,
                open_store=functools.partial(self._store_with, self._open_link()),
                cut=functools.partial(self._cut, self._bucket()),
            )
        placed = PlacedWeights(
            self.stage.model,
            choices.weights_away,
            self._open_link(),
            device=self._device(),
            wraps=False,
            on_disk=on_disk,
        )
        self._placed = placed

        def undo() -> None:
            self._placed = None
            placed.undo()

        return undo

    def _bucket(self) -> int:
        """Bytes that are stepped together."""
        trained = (p.nbytes for p in self.stage.model.parameters() if p.requires_grad)
        return bucket_bytes(sum(trained))

    def _cut(self, bucket: int, parameter: nn.Parameter) -> tuple[range, ...]:
        """The elements of each of the pieces that a parameter is stepped in."""
        optimizer, masters = self.stage.optimizer, self.stage.masters
        assert optimizer is not None
        owned = masters.master_of(parameter) if masters is not None else parameter
        size, may_cut = owned.element_size(), is_elementwise(optimizer)
        return cuts_of(parameter, size, bucket, may_cut=may_cut)

    def _move_optimizer(self, choices: Choices) -> Undo:
        """The optimizer's state, and masters, leave for the host."""
        stage = self.stage
        assert stage.optimizer is not None
        host = HostOptimizer(
            stage.model,
            stage.optimizer,
            self._open_link(),
            HostPlacement(
                host_share=choices.host_share,
                disk_share=choices.disk_share,
                gpu_share=choices.gpu_share,
                keep_gradients=choices.gradient_room,
                gradients_to_disk=choices.gradients_on == "disk",
                bucket=self._bucket(),
                ahead=choices.state_ahead,
                early=choices.state_early,
            ),
            blocks=[find_module(stage.model, path) for path in choices.blocks] or None,
            masters=stage.masters,
            weights=self._placed.streamed if self._placed is not None else None,
            clip_norm=stage.job.clip_norm,
            scaler=stage.scaler,
            home=self._placed.home if self._placed is not None else None,
            disk=functools.partial(self._store_with, self._open_link()),
        )
        stage.host = host

        def undo() -> None:
            stage.host = None
            host.undo()

        return undo

    def _step_in_backward(self, do: Callable[[Undo], Any]) -> None:
        stage = self.stage
        assert stage.optimizer is not None
        in_backward = OptimizerInBackward(
            stage.optimizer,
            masters=stage.masters,
            clip_norm=stage.job.clip_norm,
            scaler=stage.scaler,
        )
        do(in_backward.undo)

        def forget() -> None:
            stage.in_backward = None

        stage.in_backward = in_backward
        do(forget)


_BLOCK, _COMPILED = "block", "compiled"
_AWAY, _OFFLOADED = "weights away", "offloaded"
_HEAD, _IN_BACKWARD = "head", "in backward"


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One thing that is done to a module or to the optimizer, and undone by itself."""

    technique: str
    path: str = ""
    how: str = ""
    where: str = ""
    """Where what an offloaded block saves goes."""
    settings: Settings | None = None
    """Of a registered technique that may be switched."""
    comes_first: bool = False
    """Whether it goes before all else that is applied."""


def _parts(choices: Choices) -> list[_Part]:
    kind = _COMPILED if choices.compiled else _BLOCK
    switched = [
        _Part(
            technique=one.name,
            how=str(choices) if one.rests_on_all else "",
            settings=told,
            comes_first=one.changes is Target.PROCESS,
        )
        for one, told in techniques_of(choices)
        if one.can_be_switched
    ]
    parts = [part for part in switched if part.comes_first]
    parts += [
        _Part(technique=kind, path=path, how=on_the_gpu(how))
        for path, how in choices.blocks.items()
    ]
    parts += [_Part(technique=_COMPILED, path=path, how=KEEP) for path in choices.compiled_others]
    if choices.weights_away:
        parts.append(_Part(technique=_AWAY))
    parts += [
        _Part(technique=_OFFLOADED, path=path, how=choices.blocks[path], where=choices.offloaded_to)
        for path in choices.offloaded
    ]
    if choices.loss_chunk is not None:
        parts.append(_Part(technique=_HEAD, path=choices.head, how=str(choices.loss_chunk)))
    if choices.optimizer_in_backward:
        parts.append(_Part(technique=_IN_BACKWARD))
    later = [part for part in switched if not part.comes_first]
    return parts + sorted(later, key=lambda part: bool(part.how))


def _around(changed: Collection[_Part], applied: Collection[_Part]) -> set[_Part]:
    """What lies around blocks that change: it is taken off first, and put on again."""
    blocks = {part.path for part in changed if part.technique in (_BLOCK, _COMPILED)}
    away = {part for part in applied if part.technique == _AWAY and blocks}
    offloaded = {part for part in applied if part.technique == _OFFLOADED}
    return away | {part for part in offloaded if away or part.path in blocks}


def _planned(job: Job, choices: Choices) -> Job:
    return dataclasses.replace(
        job,
        precision=choices.precision,  # type: ignore[arg-type]
        micro_batch=choices.micro_batch,
        checkpointing="none",
    )


def _check_whole(choices: Choices, job: Job, model: nn.Module) -> None:
    if choices.micro_batch == job.micro_batch:
        return
    in_parts = job.micro_batch is not None
    why = "" if choices.micro_batch is None else why_whole(model)
    if why := why or why_whole_for_hooks(model, in_parts=in_parts):
        raise BadInput(f"the batch must not be split: {why}; plan again")


def refuse_applied(model: nn.Module) -> None:
    """Complain if a plan is applied to this model, or to a part of it."""
    if any(getattr(module, _MARK, False) for module in model.modules()):
        raise BadInput("a plan is applied to this model already; undo it first")


def _open_store(folder: Path | None, link: Link, largest: int, buffers: int) -> NumberedStore:
    """On the disk of a folder, or of the one that is for temporary files."""
    return NumberedDiskStore(link, folder or default_folder(), largest=largest, buffers=buffers)
