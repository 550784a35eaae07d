"""What a plan does to a job: what each technique is told, for each block where that applies.

Techniques that are registered (`plans/techniques.py`) have settings of their own here, by name. The
others still have fields.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from oomph.errors import BadInput
from oomph.plans.precisions import Precision
from oomph.plans.techniques import S, Settings, TechniqueInfo, read_settings, technique_named
from oomph.quoting import brief

Weights = Literal["own", "bf16 with fp32 masters"]
Place = Literal["gpu", "host"]
Outside = Literal["host", "disk"]

MASTERS: Weights = "bf16 with fp32 masters"

#: How a block's activations get to backward.
KEEP = "keep"
RECOMPUTE = "recompute"
_SAVING = "recompute saving "
_OFFLOADED = ", offloaded"
_OP = "[a-z]+#[0-9]{1,9}"
_HOW = re.compile(rf"({KEEP}|{RECOMPUTE}|{_SAVING}{_OP}( {_OP})*)({_OFFLOADED}( #[0-9]{{1,9}})*)?")


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Everything that apply does, and nothing else; the defaults leave a job as it is."""

    precision: str = "fp32"
    micro_batch: int | None = None
    blocks: Mapping[str, str] = field(default_factory=dict)
    """By the block's path: `keep`, `recompute`, or `recompute saving attention#0 product#2`; and
    `, offloaded` behind it where what is saved leaves the GPU (`#0 #3`: only these tensors)."""
    offloaded_to: Outside = "host"
    """Where what offloaded blocks save waits for backward."""
    compiled: bool = False
    """Whether each block is compiled."""
    compiled_others: tuple[str, ...] = ()
    """Modules outside the blocks that are compiled too, by path."""
    head: str = ""
    """The path of the output layer whose logits are never materialised."""
    loss_chunk: int | None = None
    """Rows of logits that exist at a time."""
    optimizer_in_backward: bool = False
    weights: Weights = "own"
    optimizer_on: Place = "gpu"
    """Where the optimizer's state, and masters where there are, wait between steps."""
    weights_away: tuple[str, ...] = ()
    """The paths of the blocks whose weights wait on the host too, and come when the block runs."""
    weights_away_on: Outside = "host"
    """Where these weights wait; those on the disk are read in forward and backward."""
    host_share: float = 0.0
    """The part of all parameters whose steps the host's cores make; the GPU makes the others."""
    disk_share: float = 0.0
    """The part of all parameters whose optimizer state, and masters, wait on the disk."""
    gpu_share: float = 0.0
    """The part of all parameters whose optimizer state, and masters, stay on the GPU beside it."""
    gradient_room: int | None = None
    """Bytes of gradients that wait on the GPU for the norm of all; the others wait outside it."""
    gradients_on: Outside = "host"
    """Where these others wait, but for those of parameters that the host's cores step."""
    state_ahead: int = 4
    """Buckets of state that come from the host before they are stepped, and as many that leave."""
    state_early: int = 0
    """Buckets that come as backward ends, where no step is made before all gradients are known."""
    techniques: Mapping[str, Settings] = field(default_factory=dict)
    """By name: the settings of each registered technique that is on."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "techniques", _those_on(self.techniques))
        self._check_words()
        self._check_counts()
        self._check_optimizer()
        self._check_weights_away()
        for name, settings in self.techniques.items():
            technique_named(name).check(settings, self)

    def _check_words(self) -> None:
        if self.precision not in get_args(Precision):
            known = ", ".join(get_args(Precision))
            raise BadInput(f"a plan's precision is one of {known}, not {self.precision!r}")
        for path, how in self.blocks.items():
            if not isinstance(how, str) or not _HOW.fullmatch(how):
                raise BadInput(f"{path} can be kept or recomputed, not {brief(how)}")
        if self.optimizer_on not in get_args(Place):
            raise BadInput(f"an optimizer is on gpu or host, not on {self.optimizer_on!r}")
        if self.gradients_on not in get_args(Outside):
            raise BadInput(f"gradients wait on host or disk, not on {self.gradients_on!r}")
        if self.offloaded_to not in get_args(Outside):
            raise BadInput(f"blocks are offloaded to host or disk, not to {self.offloaded_to!r}")
        if self.weights not in get_args(Weights):
            raise BadInput(f"weights are {' or '.join(get_args(Weights))}, not {self.weights!r}")

    def _check_counts(self) -> None:
        if (self.loss_chunk is None) != (not self.head):
            raise BadInput("a chunk of the loss belongs to a head, and a head to a chunk")
        if self.loss_chunk is not None and self.loss_chunk < 1:
            raise BadInput(f"a chunk of the loss has at least one row, not {self.loss_chunk}")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise BadInput(f"a micro-batch has at least one sample, not {self.micro_batch}")
        if self.state_ahead < 1:
            raise BadInput(f"at least one bucket of state comes ahead, not {self.state_ahead}")
        if self.state_early < 0:
            raise BadInput(f"no less than 0 buckets of state come early, not {self.state_early}")
        if self.gradient_room is not None and self.gradient_room < 0:
            raise BadInput(f"gradients cannot have {self.gradient_room} bytes")

    def _check_optimizer(self) -> None:
        if self.optimizer_on == "host" and self.optimizer_in_backward:
            raise BadInput(
                "an optimizer on the host is stepped in its own time, and not in backward"
            )
        if self.optimizer_on == "gpu":
            if self.host_share or self.gradient_room is not None:
                raise BadInput("the host has no share of an optimizer that is on the GPU")
            if self.disk_share:
                raise BadInput("the disk has no share of an optimizer that is on the GPU")
            if self.gpu_share:
                raise BadInput(
                    "all of an optimizer on the GPU is there: it has no share of its own"
                )
        shares = {"host": self.host_share, "disk": self.disk_share, "GPU": self.gpu_share}
        for name, share in shares.items():
            if not 0 <= share <= 1:
                raise BadInput(f"the {name}'s share is between 0 and 1, not {share}")
        if sum(shares.values()) > 1:
            raise BadInput(
                f"what the host's cores step is in memory: {self.host_share:.0%} of all there,"
                f" {self.disk_share:.0%} on the disk and {self.gpu_share:.0%} on the GPU are more"
                " than there is"
            )

    def settings(self, technique: TechniqueInfo[S]) -> S:
        """What a technique is told; its defaults, which are off, where it is not named."""
        return self.techniques.get(technique.name, technique.settings())  # type: ignore[return-value]

    def using(self, name: str, settings: Settings) -> Choices:
        """The same with other settings of one technique."""
        return dataclasses.replace(self, techniques={**self.techniques, name: settings})

    def _check_weights_away(self) -> None:
        away = self.weights_away
        if self.weights_away_on not in get_args(Outside):
            raise BadInput(f"weights wait on host or disk, not on {self.weights_away_on!r}")
        if away and self.optimizer_on != "host":
            raise BadInput("weights on the host need their optimizer there: optimizer_on='host'")
        if wrong := [path for path in away if not isinstance(path, str)]:
            raise BadInput(f"a block whose weights are on the host has a path, not {wrong[0]!r}")
        if len(set(away)) < len(away):
            raise BadInput("the weights of a block are on the host once: name each block once")
        if self.blocks and (other := [path for path in away if path not in self.blocks]):
            raise BadInput(f"{other[0]} is no block of the plan: its weights stay on the GPU")

    @property
    def recomputed(self) -> list[str]:
        """The paths of the blocks that run twice, in part or as a whole."""
        return [path for path, how in self.blocks.items() if on_the_gpu(how) != KEEP]

    @property
    def offloaded(self) -> list[str]:
        """The paths of the blocks whose saved tensors leave the GPU."""
        return [path for path, how in self.blocks.items() if is_offloaded(how)]

    @property
    def leaves(self) -> bool:
        """Whether anything waits outside the GPU."""
        return self.optimizer_on != "gpu" or bool(self.offloaded)

    @property
    def waits_on_disk(self) -> bool:
        """Whether anything waits on the disk."""
        weights = bool(self.weights_away) and self.weights_away_on == "disk"
        saved = bool(self.offloaded) and self.offloaded_to == "disk"
        gradients = self.gradient_room is not None and self.gradients_on == "disk"
        return self.disk_share > 0 or weights or saved or gradients

    @property
    def fixed_part(self) -> Choices:
        """The part that a run keeps for as long as it goes on: what its numbers are made of."""
        return dataclasses.replace(
            self,
            micro_batch=None,
            blocks={},
            offloaded_to="host",
            head="",
            loss_chunk=None,
            optimizer_in_backward=False,
            techniques=self._techniques_that(lambda one: not one.can_be_switched),
        )

    @property
    def concerning_tensors(self) -> Choices:
        """Without the techniques that change no tensor."""
        techniques = self._techniques_that(lambda one: one.concerns_tensors)
        return dataclasses.replace(self, techniques=techniques)

    @property
    def without_switchable(self) -> Choices:
        """Without the techniques that may come and go while a run goes on."""
        return dataclasses.replace(self, techniques=self.fixed_part.techniques)

    @property
    def launched_at_once(self) -> bool:
        """Whether the kernels of a micro-batch are launched all at once."""
        return any(technique_named(name).launches_at_once for name in self.techniques)

    def _techniques_that(self, stay: Callable[[TechniqueInfo[Any]], bool]) -> dict[str, Settings]:
        return {name: told for name, told in self.techniques.items() if stay(technique_named(name))}

    def as_dict(self) -> dict[str, Any]:
        """The choices as plain JSON; these keys stay."""
        return {
            **dataclasses.asdict(self),
            "blocks": dict(self.blocks),
            "compiled_others": list(self.compiled_others),
            "weights_away": list(self.weights_away),
            "techniques": {name: one.as_dict() for name, one in self.techniques.items()},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Choices:
        """The choices that `as_dict` wrote; `BadInput` names a key or value that is none.

        What is not named is off (rule 11).
        """
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(values.keys() - set(known)):
            raise BadInput(
                f"{brief(unknown[0])} is no choice of a plan; known are {', '.join(known)}"
            )
        default = cls()
        for name, value in values.items():
            expected = _KINDS.get(name) or (type(getattr(default, name)),)
            wrong_bool = isinstance(value, bool) and bool not in expected
            if not isinstance(value, expected) or wrong_bool:
                raise BadInput(f"the plan's {name} cannot be {brief(value)}")
        lists = [name for name in ("compiled_others", "weights_away") if name in values]
        for name in lists:
            if odd := [one for one in values[name] if not isinstance(one, str)]:
                raise BadInput(f"the plan's {name} are paths: {brief(odd[0])} is none")
        techniques = {
            name: read_settings(name, settings)
            for name, settings in values.get("techniques", {}).items()
        }
        paths = {name: tuple(values[name]) for name in lists}
        return cls(**{**values, **paths, "techniques": techniques})


def _those_on(techniques: Mapping[str, Settings]) -> dict[str, Settings]:
    """By name, so that what is chosen alike reads alike."""
    for name, settings in techniques.items():
        wanted = technique_named(name).settings
        if not isinstance(settings, wanted):
            raise BadInput(f"the settings of {name} are {wanted.__name__}, not {brief(settings)}")
    return {name: techniques[name] for name in sorted(techniques) if not techniques[name].are_off}


_KINDS: dict[str, tuple[type, ...]] = {
    "micro_batch": (int, type(None)),
    "loss_chunk": (int, type(None)),
    "gradient_room": (int, type(None)),
    "host_share": (int, float),
    "disk_share": (int, float),
    "gpu_share": (int, float),
    "blocks": (dict,),
    "techniques": (dict,),
    "compiled_others": (list,),
    "weights_away": (list,),
}


def saving(ops: tuple[str, ...]) -> str:
    """The name of the choice that recomputes a block but for the results of these ops."""
    return _SAVING + " ".join(ops) if ops else RECOMPUTE


def saved_ops(how: str) -> frozenset[str]:
    """The ops whose results a recomputed block keeps."""
    how = on_the_gpu(how)
    return frozenset(how.removeprefix(_SAVING).split()) if how.startswith(_SAVING) else frozenset()


def offloaded(how: str) -> str:
    """The same choice, with what is saved waiting outside the GPU."""
    return how + _OFFLOADED


def is_offloaded(how: str) -> bool:
    """Whether what the block saves leaves the GPU."""
    return _OFFLOADED in how


def on_the_gpu(how: str) -> str:
    """The same choice with everything on the GPU."""
    return how.partition(_OFFLOADED)[0]


def offloaded_tensors(how: str) -> frozenset[int] | None:
    """Which of the saved tensors leave the GPU, by their order; None for all."""
    numbers = how.partition(_OFFLOADED)[2].split()
    return frozenset(int(number.removeprefix("#")) for number in numbers) or None
