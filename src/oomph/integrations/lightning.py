"""Lightning inside a budget, in one line, and the largest batch without trying any.

Trainer(callbacks=[OomphCallback(budget="24GiB")]).fit(module, loader)

The loader, the loops and the trainer's settings stay as they are. The module's `training_step` is
given each batch in the plan's parts: the gradients of all but the last are there when Lightning
runs backward for that one. Losses and gradients are those of the whole batch, and what is logged is
logged once, as the mean over the batch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from oomph.errors import BadInput, MissingExtra, OomphError
from oomph.explaining.watching import Watch, watch
from oomph.gpus import GPU
from oomph.integrations.framework_plan import (
    Fitted,
    Say,
    fit_framework,
    resized,
    sample_batch,
    say_it,
    twin_of,
)
from oomph.job import Job, Precision, batch_size
from oomph.planning.largest_planned import PlannedLimit, largest_planned
from oomph.planning.limits import Limit, largest
from oomph.planning.plan import Plan
from oomph.reporting.plans import describe_plan_briefly
from oomph.techniques.technique import Fidelity
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
    """Plans when training starts, applies the plan, and takes it back at the end.

    `budget` is device memory, all of the card where none is given; on a GPU it is enforced.
    `batch` is one like the largest there will be; without it, it is made of the loader's longest
    samples. Longer batches than that are split into more parts. `allow` is how far numbers may be
    from those of the plain run. With `unplanned`, training goes on without a plan where none can be
    made; otherwise it stops with the reason.
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
            parse_bytes(budget)  # complains at once
        self._budget, self._sample, self._allow = budget, batch, allow
        self._unplanned, self._say = unplanned, say
        self._fitted: Fitted | None = None
        self.plan: Plan | None = None
        """The last one that was made."""
        self._watch: Watch | None = None
        self._undos = contextlib.ExitStack()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From here on an out-of-memory error is explained."""
        self._watch = watch(next_command=_NEXT)
        self._watch.__enter__()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plan with the optimizer and the loader that are there now, and apply the plan."""
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
        """Predicted and measured memory go to the trainer's own logger."""
        if self._fitted is not None and trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.log_dict(self._fitted.memory(), on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The module is plain again."""
        self._take_back()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Say why memory ran out, if that is what happened."""
        self._stop_watching(exception)
        self._take_back()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Nothing is watched any more."""
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
            # Two stand for all: from the second one on, gradients are there in forward.
            accumulated=min(trainer.accumulate_grad_batches, 2),
        )
        self._undos.callback(fitted.undo)
        self._undos.enter_context(_in_parts(trainer, module, fitted))
        self._fitted, self.plan = fitted, fitted.plan
        self._say(f"{job.name} in {describe_plan_briefly(fitted.plan)}")


def largest_batch(
    module: LightningModule,
    data: Any,
    gpu: str | GPU | None = None,
    *,
    budget: str | int | None = None,
    precision: str = "32-true",
    planned: bool = False,
) -> Limit | PlannedLimit:
    """The largest batch that fits, predicted: nothing runs, and nothing runs out of memory.

    `data` is a loader, a datamodule or a batch. The answer is for each device, whatever strategy
    runs them: one that shards the model needs less than was predicted. With `planned` it is the
    largest that a plan runs in one piece.
    """
    batch = _first_batch(data)
    name = _PRECISIONS.get(precision)
    if name is None:
        raise BadInput(f"precision is one of {', '.join(_PRECISIONS)}, not {precision!r}")
    optimizer = _only_optimizer(module.configure_optimizers())
    vars(optimizer).pop("step", None)  # a scheduler's, that nobody will step

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
    """What of this training oomph does not plan for; empty where it plans for all of it."""
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
    """The loss of a copy of the module, whose logging goes nowhere."""
    module = _silent(model)
    module._trainer = trainer
    return _loss_of(module.training_step(*_arguments(module.training_step, batch)))


def _silent(module: Any) -> Any:
    for name in ("log", "log_dict"):
        vars(module)[name] = lambda *_, **__: None
    return module


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
    own = {name: vars(module).get(name) for name in ("training_step", "optimizer_zero_grad")}

    @functools.wraps(module.training_step)  # Lightning looks at what it takes
    def training_step(*args: Any, **kwargs: Any) -> Any:
        return steps.training_step(*args, **kwargs)

    vars(module).update(training_step=training_step, optimizer_zero_grad=steps.zero_grad)
    try:
        yield
    finally:
        for name, value in own.items():
            if value is None:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = value


class _Parts:
    """Runs the parts of a batch inside what Lightning takes for one `training_step`."""

    def __init__(self, trainer: Trainer, module: LightningModule, fitted: Fitted) -> None:
        self._trainer = trainer
        self._module = module
        self._fitted = fitted
        self._training_step = module.training_step
        self._zero_grad = module.optimizer_zero_grad
        #: Whether the gradients of this batch were begun: what Lightning clears comes too late.
        self._begun = False

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """All parts but the last, forward and backward; then the forward of that one.

        What it returns has the loss of the whole batch, and the gradients of the last part.
        """
        fitted = self._fitted
        parts = fitted.split(batch)
        with fitted.autocast():
            if len(parts) == 1:
                return self._training_step(batch, *args, **kwargs)
            self._clear_gradients()
            logged = _Logged(self._module)
            done: list[Tensor] = []
            with fitted.batch(batch), logged:
                for part in parts:
                    logged.share = share = batch_size(part) / batch_size(batch)
                    outputs: list[Any] = []

                    def compute(part: Any = part, outputs: list[Any] = outputs) -> Tensor:
                        outputs.append(self._training_step(part, *args, **kwargs))
                        return _loss_of(outputs[0])

                    with fitted.part(part, share):
                        loss = fitted.weigh(compute)
                    if not fitted.settled:
                        fitted.settle(batch, lambda part: self._try(part, *args, **kwargs))
                    if part is not parts[-1]:
                        self._backward(loss)
                        done.append(loss.detach())
                        del loss, outputs
            whole = loss + torch.stack(done).sum()
        return {**outputs[0], "loss": whole} if isinstance(outputs[0], Mapping) else whole

    def _try(self, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a few samples, of which the module keeps nothing."""
        twin = _silent(twin_of(self._module))
        step = types.MethodType(self._training_step.__func__, twin)
        return _loss_of(step(batch, *args, **kwargs))

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Lightning's, unless the gradients it would clear are those of this very batch."""
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
        with torch.autocast(self._fitted.device.type, enabled=False):
            trainer.strategy.backward(loss / trainer.accumulate_grad_batches, trainer.optimizers[0])
        # Copies of weights that the next part would go on with hang on the graph of this one.
        torch.clear_autocast_cache()


class _Logged:
    """While active, what the parts of a batch log is kept; at the end it is logged once.

    Numbers become the mean over the batch; a metric object has seen all parts by itself.
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
        if isinstance(value, Tensor):
            value = value.detach()
        if isinstance(value, Tensor | int | float):
            value = value * self.share + self._values.get(name, 0.0)
        if "batch_size" in options and name in self._options and options["batch_size"]:
            options["batch_size"] += self._options[name][1]["batch_size"]
        self._values[name] = value
        self._options[name] = args, options
