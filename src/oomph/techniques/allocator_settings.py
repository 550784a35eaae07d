"""Allocator settings: expandable segments reduce fragmentation of the reserved memory."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import torch

from oomph.plans.choices import Choices
from oomph.plans.fidelity import Fidelity
from oomph.plans.techniques import Settings, Target, register
from oomph.process.rehearsal_threads import rehearses_here
from oomph.techniques.technique import ApplyContext, Technique, Undo
from oomph.torch_compat import cuda

#: The setting a plan may use; the planner checks it by replaying the step under it.
EXPANDABLE = "expandable_segments:True"
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True, kw_only=True)
class ConfiguredAllocatorSettings(Settings):
    """What PyTorch's CUDA allocator is told."""

    conf: str = ""
    """Settings for PYTORCH_CUDA_ALLOC_CONF."""


@register
class ConfiguredAllocator(Technique[ConfiguredAllocatorSettings]):
    """The allocator reserves memory in another way; a check finds out by replays which is best."""

    name = "cuda_allocator"
    title = "allocator"
    settings = ConfiguredAllocatorSettings
    changes = Target.PROCESS
    can_be_switched = True
    concerns_tensors = False
    runs_in_foreign_loops = True

    def say(self, settings: ConfiguredAllocatorSettings) -> str:
        return settings.conf or "default"

    def typed(self, settings: ConfiguredAllocatorSettings) -> str:
        return f"PYTORCH_CUDA_ALLOC_CONF={settings.conf}"

    def elsewhere(self, settings: ConfiguredAllocatorSettings) -> str:
        return f"{self.typed(settings)}, set before the start"

    def fidelity(self, settings: ConfiguredAllocatorSettings, precision: str) -> Fidelity:
        return Fidelity.EXACT

    def apply(self, settings: ConfiguredAllocatorSettings, context: ApplyContext) -> Undo:
        return set_allocator(settings.conf)


def with_allocator(choices: Choices, conf: str) -> Choices:
    """The same under these settings of the allocator."""
    return choices.using(ConfiguredAllocator.name, ConfiguredAllocatorSettings(conf=conf))


def set_allocator(settings: str) -> Undo:
    """Change the settings of PyTorch's CUDA allocator for all later allocations.

    A rehearsal changes nothing here: it passes the settings to the allocator's replay.
    """
    if not settings or rehearses_here() or not torch.cuda.is_available():
        return lambda: None
    before = _options(next((os.environ[name] for name in _VARIABLES if name in os.environ), ""))
    wanted = _options(settings)
    # On each call PyTorch resets some unnamed settings and keeps others, so name them all.
    _tell(before | wanted)
    return lambda: _tell(dict.fromkeys(wanted, "False") | before)


def _options(text: str) -> dict[str, str]:
    # A comma inside brackets separates list items, not settings.
    parts = [part for part in re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text)) if part]
    return {name: value for name, _, value in (part.partition(":") for part in parts)}


def _tell(options: dict[str, str]) -> None:
    text = ",".join(f"{name}:{value}" for name, value in options.items())
    cuda.set_allocator_settings(text)
