"""Keep Adam's two averages in 8 bits instead of 32 (lossy).

Values are stored in blocks of 256; each block has its largest magnitude in fp32 and a *level* per
value. A step goes over the parameters one by one, and over large ones slice by slice: decode the
averages to fp32, do Adam's maths, encode them again. So a step needs memory for a few slices.

Levels are spaced evenly in the logarithm, so the relative error is the same for large and small
values. Linearly spaced levels would round the small second moments of a block to zero, and Adam
divides by them. Here a nonzero second moment never becomes zero, and one that is too small for the
scale is rounded up, which only makes its updates smaller.

Adam's second moment changes by a thousandth per step, far less than half a level, so rounding to
nearest would never let it fall. Instead each step rounds at another threshold, spread evenly over
steps and values, so that over many steps the small changes add up correctly. Thresholds are
computed from the step's number, so they use no random stream and are the same after a resume.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oomph.errors import BadInput
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.plans.fidelity import Fidelity
from oomph.plans.techniques import Settings, Target, register
from oomph.techniques.optimizer_steps import replaced_step, runs_step_of, steps_in_its_place
from oomph.techniques.stochastic_rounding import round_stochastically
from oomph.techniques.technique import (
    ApplyContext,
    Inspection,
    Technique,
    Tried,
    Undo,
)
from oomph.torch_compat.optimizers import UNSCALES, WRAPPED_BY_SCHEDULER, mark_stepped

#: Values that share one scale.
BLOCK = 256
#: Parameters with fewer elements keep fp32 averages: there is little to save.
SMALLEST = 4096
#: Elements of a parameter that are processed at once; a multiple of `BLOCK`. With fewer, an H200
#: waits for the host, which launches some fifty kernels per slice.
SLICE = 1 << 23

#: Two steps that together cover a square evenly (the R2 sequence).
_OVER_NUMBERS, _OVER_STEPS = 0.7548776662466927, 0.5698402909980532


@dataclass(frozen=True, kw_only=True)
class _Levels:
    """How a value is encoded in a byte: its sign times a level, `top` for the block's largest."""

    dtype: torch.dtype
    top: int
    octaves: int
    """How far level 1 is below the block's largest value, in powers of two."""
    lowest: int
    """The level of values that are too small: 0 drops them, 1 rounds them up."""

    @property
    def per_octave(self) -> float:
        return (self.top - 1) / self.octaves

    def encode(self, values: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]:
        """Levels and scales of fp32 values, whose count is a multiple of `BLOCK`."""
        blocks = values.view(-1, BLOCK)
        scales = torch.linalg.vector_norm(blocks, torch.inf, dim=1)
        scales.clamp_(min=torch.finfo(torch.float32).tiny)
        octaves = blocks.abs().div_(scales.unsqueeze(1)).log2_()
        levels = torch.add(thresholds + self.top, octaves, alpha=self.per_octave, out=octaves)
        # The conversion rounds towards zero, that is down, whatever the sign.
        levels.clamp_(self.lowest, self.top).mul_(blocks.sign())
        return levels.to(self.dtype).view(-1), scales

    def decode(self, levels: Tensor, scales: Tensor) -> Tensor:
        """The fp32 values that were encoded, up to rounding."""
        signed = levels.to(torch.float32).view(-1, BLOCK)
        values = signed.abs().sub_(self.top)
        torch.pow(2 ** (1 / self.per_octave), values, out=values)
        return values.mul_(signed.sign_()).mul_(scales.unsqueeze(1)).view(-1)


#: Adam divides the first by the root of the second, so both cover the same range.
_AVERAGES = {
    "exp_avg": _Levels(dtype=torch.int8, top=127, octaves=16, lowest=0),
    "exp_avg_sq": _Levels(dtype=torch.uint8, top=255, octaves=32, lowest=1),
}

#: The state dict's key for the information needed to decode its bytes.
LAYOUT = "low_bit_layout"

State = dict[str, Any]

#: The optimizers that keep their state in 8 bits now. `_LowBitAdam` and its optimizer reference
#: each other: with a strong reference here, neither would ever be freed.
_APPLIED: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[_LowBitAdam]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True, kw_only=True)
class LowBitStateSettings(Settings):
    """How Adam's averages are kept."""

    enabled: bool = False
    """Whether they are kept in 8 bits."""


@register
class LowBitState(Technique[LowBitStateSettings]):
    """Adam's averages are kept in 8 bits."""

    name = "low_bit_state"
    title = "optimizer state"
    words = ("as it is", "8-bit")
    settings = LowBitStateSettings
    changes = Target.OPTIMIZER
    tried = Tried.AS_VARIANT
    # What was rounded to 8 bits and read back is rounded once more.
    comes_back = False
    advice = "8-bit optimizer state needs less"

    def elsewhere(self, settings: LowBitStateSettings) -> str:
        return "8-bit optimizer state"

    def fidelity(self, settings: LowBitStateSettings, precision: str) -> Fidelity:
        return Fidelity.LOSSY

    def check(self, settings: LowBitStateSettings, choices: Choices) -> None:
        if choices.optimizer_on == "host":
            raise BadInput("an optimizer on the host is stepped with its own state: not in 8 bits")

    def inspect(self, job: Job) -> Inspection:
        return _TriedOut()

    def apply(self, settings: LowBitStateSettings, context: ApplyContext) -> Undo:
        return low_bit_state(context.optimizer)


class _TriedOut(Inspection):
    """Whether it is refused for the optimizer, told by trying."""

    why_not = ""

    def built(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        try:
            low_bit_state(optimizer)()
        except BadInput as error:
            self.why_not = str(error)


def low_bit_state(optimizer: torch.optim.Optimizer, *, stochastic_rounding: bool = True) -> Undo:
    """Keep the averages of an Adam or AdamW in 8 bits from now on, including existing ones.

    bf16 parameters are stepped in fp32 and rounded stochastically, or to nearest without
    `stochastic_rounding`. Undo converts the averages back to plain Adam's.
    """
    if not runs_step_of(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        raise BadInput(f"8-bit state is for Adam and AdamW, not for {type(optimizer).__name__}")
    if replaced := replaced_step(optimizer):
        raise BadInput(f"{replaced}, which 8-bit state would pass by: choose one or the other")
    for group in optimizer.param_groups:
        _check_group(group)
    low_bit = _LowBitAdam(optimizer, stochastic_rounding)
    return low_bit.undo


def has_low_bit_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its averages are in 8 bits now."""
    return optimizer in _APPLIED


def rounding_generators(
    optimizer: torch.optim.Optimizer,
) -> dict[torch.device, torch.Generator]:
    """The generators its next steps use for rounding; separate from the user's random stream."""
    reference = _APPLIED.get(optimizer)
    applied = reference() if reference is not None else None
    return applied.generators if applied is not None else {}


def _check_group(group: dict[str, Any]) -> None:
    """Refuse options and parameters that this step does not support."""
    for option in ("amsgrad", "differentiable"):
        if group[option]:
            raise BadInput(f"8-bit state does not go with {option}=True: set it to False")
    if any(isinstance(beta, Tensor) for beta in group["betas"]):
        raise BadInput("8-bit state needs betas as numbers, not as tensors")
    for parameter in group["params"]:
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            raise BadInput(f"8-bit state is for fp32 and bf16 parameters, not {parameter.dtype}")
        if not parameter.permute(_order(parameter)).is_contiguous():
            raise BadInput("8-bit state needs parameters without gaps: make them contiguous")


class _LowBitAdam:
    """Replaces the step of one optimizer, and keeps its state low-bit through saving and loading.

    The step is replaced on the instance and goes over `optimizer.param_groups`. So code that puts a
    single parameter there steps only that one, and schedulers may wrap the step before or after.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, stochastic_rounding: bool) -> None:
        self._optimizer = optimizer
        self._stochastic_rounding = stochastic_rounding
        #: By device: random bits of our own, so that the user's random stream is left alone.
        self.generators: dict[torch.device, torch.Generator] = {}
        self._loading: dict[Any, State] = {}
        # Convert all before replacing any, so that running out of memory here changes nothing.
        converted = {p: _to_low_bit(p, state) for p, state in optimizer.state.items() if state}
        optimizer.state.update(converted)
        self._active = True
        _APPLIED[optimizer] = weakref.ref(self)
        self._hooks = (
            optimizer.register_state_dict_post_hook(self._after_save),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        )
        self._own = {
            name: vars(optimizer)[name] for name in ("step", UNSCALES) if name in vars(optimizer)
        }
        self._step: Any = self._make_step()
        optimizer.step = self._step  # type: ignore[method-assign]
        # Have a GradScaler unscale the gradients itself, as for any step that is not fused.
        setattr(optimizer, UNSCALES, False)

    def undo(self) -> None:
        """Go back to plain Adam."""
        if not self._active:
            return
        optimizer = self._optimizer
        converted = {p: _to_plain(p, state) for p, state in optimizer.state.items() if state}
        optimizer.state.update(converted)
        self._active = False
        _APPLIED.pop(optimizer, None)
        for hook in self._hooks:
            hook.remove()
        # A scheduler made since then wraps our step, which stays in place and calls the plain one.
        names = [UNSCALES]
        if vars(optimizer).get("step") is self._step:
            names.append("step")
        for name in names:
            vars(optimizer).pop(name, None)
            if name in self._own:
                setattr(optimizer, name, self._own[name])
        self._step = None  # break the reference cycle

    def _make_step(self) -> Any:
        def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            mark_stepped(optimizer)  # for schedulers
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._step_all()
            return loss

        hooked: Any = torch.optim.Optimizer.profile_hook_step(step)

        @steps_in_its_place
        def step_or_pass_on(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            run = hooked if self._active else type(optimizer).step
            return run(optimizer, *args, **kwargs)

        if hasattr(self._optimizer.step, WRAPPED_BY_SCHEDULER):
            setattr(step_or_pass_on, WRAPPED_BY_SCHEDULER, True)
        return types.MethodType(step_or_pass_on, self._optimizer)

    # -- the step ---------------------------------------------------------------------------------

    @torch.no_grad()
    def _step_all(self) -> None:
        for group in self._optimizer.param_groups:
            _check_group(group)  # it may have been added or changed since
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)

    def _step_one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self._optimizer.state[parameter]
        if not state:
            state.update(_new_state(parameter, group))
        state["step"] += 1
        order = _order(parameter)
        weights = parameter.permute(order).view(-1)
        gradient = parameter.grad.permute(order).reshape(-1)  # type: ignore[union-attr]
        thresholds = _thresholds(state["step"], parameter.device)
        corrections = _corrections(state["step"], group)
        for part in _slices(parameter.numel()):
            # fp32 weights and averages are changed in place, others are written back below.
            new = weights[part].to(torch.float32)
            averages = {name: _read(state, name, part) for name in _AVERAGES}
            _adam(new, gradient[part].to(torch.float32), averages, corrections, group)
            if parameter.dtype is torch.bfloat16:
                weights[part].copy_(self._round(new))
            del new
            for name in _AVERAGES:
                _write(state, name, part, averages.pop(name), thresholds)

    def _round(self, values: Tensor) -> Tensor:
        if not self._stochastic_rounding:
            return values
        return round_stochastically(values, self._generator(values.device))

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self.generators:
            self.generators[device] = torch.Generator(device)
        return self.generators[device]

    # -- saving and loading -----------------------------------------------------------------------

    def _after_save(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Add the information needed to decode the bytes, and the states of our generators."""
        layout = {
            "orders": {at: _order(p) for at, p in self._owned_by_id(state_dict)},
            "streams": {str(place): one.get_state() for place, one in self.generators.items()},
        }
        return {**state_dict, LAYOUT: layout}

    def _before_load(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Hold the averages back from PyTorch, which would cast them to the parameter's type."""
        saved, layout = state_dict["state"], state_dict.get(LAYOUT, {"orders": {}, "streams": {}})
        self._loading = {
            p: _in_order(p, saved[at], layout["orders"].get(at))
            for at, p in self._owned_by_id(state_dict)
            if at in saved
        }
        for device in {p.device for p in self._loading}:  # the file may be from another machine
            if str(device) in layout["streams"]:
                self._generator(device).set_state(layout["streams"][str(device)])
        steps = {at: {"step": state["step"]} for at, state in saved.items() if state}
        return {**state_dict, "state": steps}

    def _owned_by_id(self, state_dict: dict[str, Any]) -> Iterator[tuple[Any, Tensor]]:
        """The optimizer's parameters, each with its id in a state dict."""
        ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        owned = chain.from_iterable(group["params"] for group in self._optimizer.param_groups)
        return zip(ids, owned, strict=False)

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in self._loading.items():
            if state:
                # A copy: a step must not change what was loaded from.
                copied = {
                    name: value.to(parameter.device, copy=True)
                    for name, value in state.items()
                    if name != "step"
                }
                step = {"step": optimizer.state[parameter]["step"].clone()}
                optimizer.state[parameter] = _to_low_bit(parameter, {**copied, **step})
        self._loading = {}


def _adam(
    weights: Tensor,
    gradient: Tensor,
    averages: dict[str, Tensor],
    corrections: tuple[Tensor, Tensor],
    group: dict[str, Any],
) -> None:
    """Adam's update of weights and averages in place, as `torch.optim.Adam` defines it."""
    lr, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
    if group["maximize"]:
        gradient = -gradient
    if decay and group["decoupled_weight_decay"]:
        weights.mul_(1 - lr * decay)
    elif decay:
        gradient = gradient.add(weights, alpha=decay)
    mean = averages["exp_avg"].lerp_(gradient, 1 - beta1)
    square = averages["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    of_mean, of_root = corrections
    root = square.sqrt().div_(of_root).add_(group["eps"])
    update = torch.div(mean, root, out=root)
    weights.sub_(update.mul_(lr / of_mean))


def _corrections(step: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Adam's bias corrections: the divisors of the mean and of the root of the mean square."""
    # The counter may be on the device: it is only computed with, never read on the host.
    count = step.to(torch.float64)
    beta1, beta2 = group["betas"]
    return 1 - beta1**count, (1 - beta2**count).sqrt()


def _order(parameter: Tensor) -> list[int]:
    """The dimensions in memory order, in which channels-last weights, too, are contiguous."""
    return sorted(range(parameter.dim()), key=lambda at: -parameter.stride()[at])


def _slices(elements: int) -> Iterator[slice]:
    for start in range(0, elements, SLICE):
        yield slice(start, min(start + SLICE, elements))


def _thresholds(step: Tensor, device: torch.device) -> Tensor:
    """This step's rounding threshold for each value of a block, from 0 (down) to 1 (up)."""
    numbers = torch.arange(BLOCK, dtype=torch.float64, device=device).mul_(_OVER_NUMBERS)
    return numbers.add_(step.to(torch.float64) * _OVER_STEPS).frac_().to(torch.float32)


# -- state: `exp_avg` in fp32 for small parameters, `exp_avg_8bit` and `exp_avg_scale` for others --


def _new_state(parameter: Tensor, group: dict[str, Any]) -> State:
    # The device where plain Adam keeps its counter, so that undo need not move it.
    place = parameter.device if group["fused"] or group["capturable"] else torch.device("cpu")
    state: State = {"step": torch.zeros((), dtype=torch.float32, device=place)}
    for name in _AVERAGES:
        state |= _empty(parameter, name)
    return state


def _empty(parameter: Tensor, name: str) -> State:
    if parameter.numel() < SMALLEST:
        return {name: torch.zeros_like(parameter, dtype=torch.float32)}
    blocks = -(-parameter.numel() // BLOCK)
    levels = parameter.new_zeros(blocks * BLOCK, dtype=_AVERAGES[name].dtype)
    return {
        f"{name}_8bit": levels,
        f"{name}_scale": parameter.new_zeros(blocks, dtype=torch.float32),
    }


def _read(state: State, name: str, part: slice) -> Tensor:
    """A slice of an average in fp32, to be changed in place and written back."""
    if name in state:
        average: Tensor = state[name]
        return average.permute(_order(average)).view(-1)[part]
    elements, blocks = _whole_blocks(part)
    levels, scales = state[f"{name}_8bit"][elements], state[f"{name}_scale"][blocks]
    return _AVERAGES[name].decode(levels, scales)[: part.stop - part.start]


def _write(state: State, name: str, part: slice, average: Tensor, thresholds: Tensor) -> None:
    if name in state:
        return  # was changed in place
    elements, blocks = _whole_blocks(part)
    padding = elements.stop - part.stop
    values = F.pad(average, (0, padding)) if padding else average
    levels, scales = _AVERAGES[name].encode(values, thresholds)
    state[f"{name}_8bit"][elements] = levels
    state[f"{name}_scale"][blocks] = scales


def _whole_blocks(part: slice) -> tuple[slice, slice]:
    """The elements and the blocks of a slice that starts at a block."""
    first, end = part.start // BLOCK, -(-part.stop // BLOCK)
    return slice(part.start, end * BLOCK), slice(first, end)


def _to_low_bit(parameter: Tensor, state: State) -> State:
    """Convert plain Adam's state to 8 bits; averages already in 8 bits are kept."""
    converted: State = {"step": state["step"]}
    thresholds = _thresholds(state["step"], parameter.device)
    for name in _AVERAGES:
        if f"{name}_8bit" in state:
            converted |= {key: state[key] for key in (f"{name}_8bit", f"{name}_scale")}
            continue
        converted |= _empty(parameter, name)
        source = state[name].permute(_order(parameter)).reshape(-1)
        for part in _slices(parameter.numel()):
            if name in converted:
                _read(converted, name, part).copy_(source[part])
            else:
                _write(converted, name, part, source[part].to(torch.float32), thresholds)
    return converted


def plain_state_dict(state_dict: dict[str, Any], shapes: Mapping[Any, Tensor]) -> dict[str, Any]:
    """An optimizer's saved state as plain Adam would have saved it.

    `shapes` maps each parameter's id in the state dict to a tensor of its shape and type.
    """
    layout = state_dict.get(LAYOUT)
    if layout is None:
        return state_dict
    state = {
        at: _to_plain(_ordered_like(shapes[at], layout["orders"][at]), one) if one else one
        for at, one in state_dict["state"].items()
    }
    rest = {key: value for key, value in state_dict.items() if key != LAYOUT}
    return {**rest, "state": state}


def _in_order(parameter: Tensor, state: State, order: list[int] | None) -> State:
    """The saved state of a parameter whose memory order may have changed since."""
    if order is None or not state or order == _order(parameter):
        return state
    return _to_plain(_ordered_like(parameter.detach().cpu(), order), state)


def _ordered_like(parameter: Tensor, order: list[int]) -> Tensor:
    """An empty tensor like the parameter, with its dimensions in this order in memory."""
    empty = torch.empty([parameter.shape[at] for at in order], dtype=parameter.dtype, device="cpu")
    return empty.permute([order.index(at) for at in range(len(order))])


def _to_plain(parameter: Tensor, state: State) -> State:
    """Convert the state to plain Adam's."""
    converted: State = {"step": state["step"]}
    for name in _AVERAGES:
        average = converted[name] = torch.zeros_like(parameter)
        if name in state:
            average.copy_(state[name])
            continue
        flat = average.permute(_order(parameter)).view(-1)
        for part in _slices(parameter.numel()):
            flat[part].copy_(_read(state, name, part))
    return converted
