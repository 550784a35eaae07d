"""Lightning inside a budget in one line, and the largest batch without trial runs.

Trainer(callbacks=[OomphCallback(budget="24GiB")]).fit(module, loader)

The loader, the loops and the trainer's settings stay as they are. The module's `training_step` gets
each batch in the plan's parts: the gradients of all parts but the last exist when Lightning runs
the backward of the last. Losses and gradients are those of the whole batch, and each value is
logged once, as the mean over the batch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oomph.errors import BadInput, MissingExtra, OomphError
from oomph.explaining.watching import Watch, watch
from oomph.hardware import GPU
from oomph.integrations.framework_plan import (
    Fitted,
    Say,
    fit_framework,
    resized,
    sample_batch,
    say_it,
    twin_of,
)
from oomph.jobs.job import Job, batch_size
from oomph.plans.fidelity import Fidelity
from oomph.plans.plan import Plan
from oomph.plans.precisions import Precision
from oomph.search.largest_planned import PlannedLimit, largest_planned
from oomph.search.limits import Limit, largest
from oomph.techniques.batch_calls import unwatched
from oomph.torch_compat.pytree import tree_map
from oomph.units import parse_bytes

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise MissingExtra("lightning", "lightning") from error

_NEXT = "oomph.integrations.lightning.OomphCallback(budget=…) among the trainer's callbacks"

#: Lightning's names of precisions; weights in fp16 have no loss scaler and no plan.
_PRECISIONS: dict[str, Precision] = {
    "32-true": "fp32",
    "64-true": "fp32",
    "16-mixed": "fp16-mixed",
    "bf16-mixed": "bf16-mixed",
    "bf16-true": "bf16",
}


class OomphCallback(Callback):
    """Plans when training starts, applies the plan, and undoes it at the end.

    `budget` is device memory, by default all of the card; on a GPU it is enforced. `batch` is an
    example of the largest batches, by default one of the loader's longest samples. Longer batches
    are split into more parts. `allow` is how far results may differ from those of the plain run.
    With `unplanned`, training continues without a plan if none can be made; otherwise it stops with
    the reason.
    """

    def __init__(
        self,
        budget: str | int | None = None,
        *,
        batch: Any = None,
        allow: str | Fidelity = Fidelity.EXACT,
        unplanned: bool = False,
        say: Say = say_it,
    ) -> None:
        if budget is not None:
            parse_bytes(budget)  # raises early
        self._budget, self._sample, self._allow = budget, batch, allow
        self._unplanned, self._say = unplanned, say
        self._fitted: Fitted | None = None
        self.plan: Plan | None = None
        """The latest plan."""
        self._watch: Watch | None = None
        self._undos = contextlib.ExitStack()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start watching, so that an out-of-memory error is explained."""
        self._watch = watch(next_command=_NEXT)
        self._watch.__enter__()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plan with the optimizer and the loader, which exist by now, and apply the plan."""
        try:
            self._fit(trainer, pl_module)
        except OomphError as error:
            self._take_back()
            if not self._unplanned:
                raise
            self._say(f"training goes on without a plan: {error}")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any
    ) -> None:
        """Log predicted and measured memory to the trainer's own logger."""
        if self._fitted is not None and trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.log_dict(self._fitted.memory(), on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Undo the plan."""
        self._take_back()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Say why memory ran out, if that is what happened."""
        self._stop_watching(exception)
        self._take_back()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop watching, and undo the plan."""
        self._stop_watching(None)
        self._take_back()

    def _stop_watching(self, error: BaseException | None) -> None:
        watching, self._watch = self._watch, None
        if watching is not None:
            kind = type(error) if error is not None else None
            watching.__exit__(kind, error, error.__traceback__ if error is not None else None)

    def _take_back(self) -> None:
        self._fitted = None
        self._undos.close()

    def _fit(self, trainer: Trainer, module: LightningModule) -> None:
        if why := _why_not(trainer, module):
            raise BadInput(f"{why}; oomph plans for one optimizer on one device")
        device = module.device
        batch = self._sample
        if batch is None:
            batch = sample_batch(trainer.train_dataloader, device)
        norm = trainer.gradient_clip_val if trainer.gradient_clip_algorithm != "value" else None
        job = Job(
            module,
            functools.partial(_rehearsed_loss, trainer),
            trainer.optimizers[0],
            batch,
            precision=_PRECISIONS[trainer.precision],
            clip_norm=float(norm) if norm else None,
            name=type(module).__name__,
        )
        fitted = fit_framework(
            job,
            device=device,
            budget=self._budget,
            allow=self._allow,
            # Two represent all: from the second one on, gradients already exist during forward.
            accumulated=min(trainer.accumulate_grad_batches, 2),
        )
        self._undos.callback(fitted.undo)
        self._undos.enter_context(_in_parts(trainer, module, fitted))
        self._fitted, self.plan = fitted, fitted.plan
        self._say(f"{job.name} in {fitted.plan.summary}")


def largest_batch(
    module: LightningModule,
    data: Any,
    gpu: str | GPU | None = None,
    *,
    budget: str | int | None = None,
    precision: str = "32-true",
    planned: bool = False,
) -> Limit | PlannedLimit:
    """Predict the largest batch that fits; nothing runs, and nothing runs out of memory.

    `data` is a loader, a datamodule or a batch. The answer is per device, for any strategy; a
    strategy that shards the model needs less than predicted. With `planned` it is the largest batch
    that a plan runs in one piece.
    """
    batch = _first_batch(data)
    name = _PRECISIONS.get(precision)
    if name is None:
        raise BadInput(f"precision is one of {', '.join(_PRECISIONS)}, not {precision!r}")
    optimizer = _only_optimizer(module.configure_optimizers())
    vars(optimizer).pop("step", None)  # the wrapper of a scheduler, which is not used here

    def make_job(size: int) -> Job:
        return Job(
            module,
            functools.partial(_rehearsed_loss, None),
            optimizer,
            resized(batch, size),
            precision=name,
            name=type(module).__name__,
        )

    search = largest_planned if planned else largest
    return search(make_job, gpu, budget=budget, start=batch_size(batch))


def _first_batch(data: Any) -> Any:
    if hasattr(data, "train_dataloader"):
        data.prepare_data()
        data.setup("fit")
        data = data.train_dataloader()
    if isinstance(data, Tensor | Mapping | tuple | list):
        return data
    return sample_batch(data, torch.device("cpu"))


def _only_optimizer(configured: Any) -> torch.optim.Optimizer:
    """The optimizer in whatever `configure_optimizers` returned."""
    if isinstance(configured, Mapping):
        configured = configured["optimizer"]
    if isinstance(configured, tuple) and configured and isinstance(configured[0], list):
        configured = configured[0]
    found = configured if isinstance(configured, list | tuple) else [configured]
    if len(found) == 1 and isinstance(found[0], Mapping):
        return _only_optimizer(found[0])
    if len(found) != 1 or not isinstance(found[0], torch.optim.Optimizer):
        raise BadInput("oomph predicts for modules with one optimizer")
    return found[0]


def _why_not(trainer: Trainer, module: LightningModule) -> str:
    """Why oomph cannot plan for this training; empty if it can."""
    reasons = {
        f"the training runs on {trainer.world_size} devices": trainer.world_size > 1,
        "the module steps its optimizers itself (manual optimization)": (
            not module.automatic_optimization
        ),
        f"the module has {len(trainer.optimizers)} optimizers": len(trainer.optimizers) != 1,
        f"a precision of {trainer.precision} is not planned for": (
            trainer.precision not in _PRECISIONS
        ),
        "training_step takes the loader's iterator, not a batch": (
            "dataloader_iter" in inspect.signature(module.training_step).parameters
        ),
    }
    return next((why for why, applies in reasons.items() if applies), "")


def _rehearsed_loss(trainer: Trainer | None, model: nn.Module, batch: Any) -> Tensor:
    """The loss of a copy of the module, with its logging disabled."""
    module: Any = model
    own = module._trainer
    with _silenced(module):
        module._trainer = trainer
        try:
            return _loss_of(module.training_step(*_arguments(module.training_step, batch)))
        finally:
            module._trainer = own


@contextlib.contextmanager
def _silenced(module: Any) -> Iterator[None]:
    """While active, the module's logging methods do nothing."""
    names = ("log", "log_dict")
    own = {name: vars(module)[name] for name in names if name in vars(module)}
    vars(module).update(dict.fromkeys(names, lambda *_, **__: None))
    try:
        yield
    finally:
        for name in names:
            del vars(module)[name]
        vars(module).update(own)


def _arguments(training_step: Callable[..., Any], batch: Any, index: int = 0) -> tuple[Any, ...]:
    takes_index = len(inspect.signature(training_step).parameters) > 1
    return (batch, index) if takes_index else (batch,)


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise BadInput(
            "training_step returned no loss, and a part of a batch cannot be left out: return one"
            " for every batch"
        )
    return loss


# -- a batch in parts ------------------------------------------------------------------------------


@contextlib.contextmanager
def _in_parts(trainer: Trainer, module: LightningModule, fitted: Fitted) -> Iterator[None]:
    """While active, `training_step` runs each batch in the plan's parts."""
    steps = _Parts(trainer, module, fitted)

    @functools.wraps(module.training_step)  # Lightning inspects its signature
    def training_step(*args: Any, **kwargs: Any) -> Any:
        return steps.training_step(*args, **kwargs)

    ours = {"training_step": training_step, "optimizer_zero_grad": steps.zero_grad}
    own = {name: vars(module)[name] for name in ours if name in vars(module)}

    def put_back() -> None:
        for name in ours:
            del vars(module)[name]
        vars(module).update(own)

    @contextlib.contextmanager
    def plain() -> Iterator[None]:
        put_back()
        try:
            yield
        finally:
            vars(module).update(ours)

    vars(module).update(ours)
    fitted.plain_model = plain
    try:
        yield
    finally:
        put_back()


class _Parts:
    """Runs the parts of a batch inside one `training_step` of Lightning."""

    def __init__(self, trainer: Trainer, module: LightningModule, fitted: Fitted) -> None:
        self._trainer = trainer
        self._module = module
        self._fitted = fitted
        self._training_step = module.training_step
        self._zero_grad = module.optimizer_zero_grad
        #: Whether gradients of this batch exist already, so that Lightning must not clear them.
        self._begun = False

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward of all parts but the last, then the last part's forward.

        The returned loss has the whole batch's value and the last part's graph.
        """
        fitted = self._fitted
        with fitted.autocast():
            if len(fitted.split(batch)) == 1:
                return self._training_step(batch, *args, **kwargs)
            self._clear_gradients()
            return fitted.in_parts(batch, lambda parts: self._run(batch, parts, args, kwargs))

    def _run(self, batch: Any, parts: list[Any], args: Any, kwargs: Any) -> Any:
        fitted, logged = self._fitted, _Logged(self._module)
        done: list[Tensor] = []
        returned: list[tuple[Mapping[str, Any], int, float]] = []
        with logged:
            for part in parts:
                logged.share = share = fitted.share(part, batch)
                outputs: list[Any] = []

                def compute(part: Any = part, outputs: list[Any] = outputs) -> Tensor:
                    outputs.append(self._training_step(part, *args, **kwargs))
                    return _loss_of(outputs[0])

                with fitted.part(part, share):
                    loss = fitted.weigh(compute)
                if isinstance(outputs[0], Mapping):
                    beside = {k: v for k, v in outputs[0].items() if k != "loss"}
                    returned.append((tree_map(_detached, beside), batch_size(part), share))
                if not fitted.is_settled:
                    fitted.settle(batch, lambda part: self._try(part, *args, **kwargs))
                if part is not parts[-1]:
                    self._backward(loss)
                    done.append(loss.detach())
                    del loss, outputs
        whole = loss + torch.stack(done).sum()
        if not isinstance(outputs[0], Mapping):
            return whole
        return {**outputs[0], **_of_the_batch(returned), "loss": whole}

    def _try(self, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a few samples, computed on a twin so that the module keeps no trace."""
        twin = twin_of(self._module)
        step = types.MethodType(self._training_step.__func__, twin)
        with _silenced(twin):
            return _loss_of(step(batch, *args, **kwargs))

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Call Lightning's own, unless it would clear gradients of the current batch."""
        if not self._begun:
            self._zero_grad(*args, **kwargs)
        self._begun = False

    def _clear_gradients(self) -> None:
        trainer = self._trainer
        index = trainer.fit_loop.epoch_loop.batch_idx
        if index % trainer.accumulate_grad_batches == 0:
            self._zero_grad(trainer.current_epoch, index, trainer.optimizers[0])
            self._begun = True

    def _backward(self, loss: Tensor) -> None:
        trainer = self._trainer
        # Hooks run only for the last part, when the gradients of the whole batch are there.
        callbacks: list[Any] = trainer.callbacks
        silenced = _without_hooks([self._module, *callbacks])
        with torch.autocast(self._fitted.device.type, enabled=False), silenced:
            trainer.strategy.backward(loss / trainer.accumulate_grad_batches, trainer.optimizers[0])
        # Autocast's cached weights belong to this part's graph; the next part needs new ones.
        torch.clear_autocast_cache()


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _of_the_batch(returned: Sequence[tuple[Mapping[str, Any], int, float]]) -> dict[str, Any]:
    """Combine what the steps of the parts returned beside their losses: per-sample tensors are
    concatenated, floating-point scalars averaged, integer scalars summed, and anything else is
    taken from the last part."""
    found: dict[str, Any] = {}
    for name, last in returned[-1][0].items():
        values = [one.get(name) for one, _, _ in returned]
        tensors = [value for value in values if isinstance(value, Tensor)]
        sizes = [size for _, size, _ in returned]
        found[name] = last
        if len(tensors) < len(values) or (last.dtype is torch.bool and not last.dim()):
            continue
        if all(one.dim() and len(one) == size for one, size in zip(tensors, sizes, strict=True)):
            if len({one.shape[1:] for one in tensors}) == 1:
                found[name] = torch.cat(tensors)
        elif not any(one.dim() for one in tensors):
            shares = [share if last.is_floating_point() else 1 for _, _, share in returned]
            pairs = zip(tensors, shares, strict=True)
            found[name] = torch.stack([one * share for one, share in pairs]).sum()
    return found


#: Hooks that Lightning calls around the backward of a batch.
_AROUND_BACKWARD = ("on_before_backward", "on_after_backward")


@contextlib.contextmanager
def _without_hooks(owners: Sequence[Any]) -> Iterator[None]:
    """While active, the owners' hooks around a backward do nothing."""
    own = [{n: vars(one)[n] for n in _AROUND_BACKWARD if n in vars(one)} for one in owners]
    for one in owners:
        vars(one).update(dict.fromkeys(_AROUND_BACKWARD, lambda *_: None))
    try:
        yield
    finally:
        for one, had in zip(owners, own, strict=True):
            for name in _AROUND_BACKWARD:
                del vars(one)[name]
            vars(one).update(had)


class _Logged:
    """While active, collects what the parts of a batch log; at the end it is logged once.

    Numbers become the mean over the batch; a metric object has accumulated all parts itself.
    """

    def __init__(self, module: LightningModule) -> None:
        self.share = 1.0
        self._module = module
        self._values: dict[str, Any] = {}
        self._options: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def __enter__(self) -> None:
        vars(self._module)["log"] = self._keep

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        vars(self._module).pop("log", None)
        if kind is not None:
            return
        for name, (args, options) in self._options.items():
            self._module.log(name, self._values[name], *args, **options)

    def _keep(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        with unwatched():  # these ops are not part of the loss
            if isinstance(value, Tensor):
                value = value.detach()
            if isinstance(value, Tensor | int | float):
                value = value * self.share + self._values.get(name, 0.0)
        if "batch_size" in options and name in self._options and options["batch_size"]:
            options["batch_size"] += self._options[name][1]["batch_size"]
        self._values[name] = value
        self._options[name] = args, options
