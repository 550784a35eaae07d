"""oomph: makes any PyTorch model fit in the GPU memory you have.

import oomph
print(oomph.estimate(job, gpu="rtx-4090"))           # will it fit?
print(oomph.plan(job, gpu="rtx-4090"))               # make it fit
run = oomph.fit(model, optimizer, loss, batch, budget="24GiB")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oomph.errors import (
        BadInput,
        CannotRehearse,
        DoesNotFit,
        MissingExtra,
        OomphError,
        StalePlan,
        UnknownName,
    )
    from oomph.estimation import Estimate, Ledgers, estimate
    from oomph.gpus import GPU, find_gpu, known_gpus
    from oomph.job import Job
    from oomph.job_sources import job_from_config, job_from_factory, job_from_name
    from oomph.models import find_model, known_models
    from oomph.planning.best_cards import BestCards, best_cards
    from oomph.planning.cards import CardSurvey, CardVerdict, survey_cards
    from oomph.planning.choices import Choices
    from oomph.planning.largest_planned import PlannedLimit, largest_planned
    from oomph.planning.limits import Limit, largest
    from oomph.planning.plan import Change, Plan
    from oomph.planning.planner import plan
    from oomph.rehearsal.phases import rehearse
    from oomph.rehearsal.timeline import Block, Category, Timeline
    from oomph.running.run import Run, apply, fit
    from oomph.techniques.technique import Fidelity

#: Where each public name lives. It is imported when first used: `oomph --help` needs no torch.
_HOMES = {
    "errors": (
        "BadInput",
        "CannotRehearse",
        "DoesNotFit",
        "MissingExtra",
        "OomphError",
        "StalePlan",
        "UnknownName",
    ),
    "estimation": ("Estimate", "Ledgers", "estimate"),
    "gpus": ("GPU", "find_gpu", "known_gpus"),
    "job": ("Job",),
    "job_sources": ("job_from_config", "job_from_factory", "job_from_name"),
    "models": ("find_model", "known_models"),
    "planning.best_cards": ("BestCards", "best_cards"),
    "planning.cards": ("CardSurvey", "CardVerdict", "survey_cards"),
    "planning.choices": ("Choices",),
    "planning.largest_planned": ("PlannedLimit", "largest_planned"),
    "planning.limits": ("Limit", "largest"),
    "planning.plan": ("Change", "Plan"),
    "planning.planner": ("plan",),
    "rehearsal.phases": ("rehearse",),
    "rehearsal.timeline": ("Block", "Category", "Timeline"),
    "running.run": ("Run", "apply", "fit"),
    "techniques.technique": ("Fidelity",),
}

__all__ = [
    "GPU",
    "BadInput",
    "BestCards",
    "Block",
    "CannotRehearse",
    "CardSurvey",
    "CardVerdict",
    "Category",
    "Change",
    "Choices",
    "DoesNotFit",
    "Estimate",
    "Fidelity",
    "Job",
    "Ledgers",
    "Limit",
    "MissingExtra",
    "OomphError",
    "Plan",
    "PlannedLimit",
    "Run",
    "StalePlan",
    "Timeline",
    "UnknownName",
    "apply",
    "best_cards",
    "estimate",
    "find_gpu",
    "find_model",
    "fit",
    "job_from_config",
    "job_from_factory",
    "job_from_name",
    "known_gpus",
    "known_models",
    "largest",
    "largest_planned",
    "plan",
    "rehearse",
    "survey_cards",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(f"oomph.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'oomph' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
