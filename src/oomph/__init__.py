"""oomph: makes any PyTorch model fit in the GPU memory you have.

import oomph
print(oomph.estimate(job, gpu="rtx-4090"))           # will it fit?
print(oomph.plan(job, gpu="rtx-4090"))               # make it fit
run = oomph.fit(model, optimizer, loss, batch, budget="24GiB")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from oomph.plans.techniques import load_with as load_techniques_with
from oomph.rendering import load_with

if TYPE_CHECKING:
    from oomph.advising.advice import Advice, advise
    from oomph.data.batch_shapes import in_shape
    from oomph.data.loader import Loader
    from oomph.data.packed_rows import (
        PackedDataset,
        block_diagonal_mask,
        check_packing,
        for_flash_attention,
    )
    from oomph.data.packing import PackedBatches
    from oomph.data.padding import pad_samples
    from oomph.data.prefetch import Prefetcher
    from oomph.data.prefetch_memory import prefetched_bytes
    from oomph.data.token_batches import TokenBatches
    from oomph.data.token_limit import tokens_that_fit
    from oomph.data.waste import Waste
    from oomph.data.worker_tuning import TunedWorkers, tune_workers
    from oomph.engine.evaluating import Evaluation
    from oomph.errors import (
        BadCheckpoint,
        BadInput,
        CannotRehearse,
        DiskDamaged,
        DiskFull,
        DoesNotFit,
        HostMemoryFull,
        HostTooSmall,
        MissingExtra,
        OomphError,
        OutOfMemory,
        RunBusy,
        StalePlan,
        StepBroken,
        UnknownName,
        WrongCheckpoint,
    )
    from oomph.explaining.comparing import Comparison, compare
    from oomph.explaining.explanation import Explanation, explain
    from oomph.explaining.watching import watch
    from oomph.hardware import GPU, find_gpu, known_gpus
    from oomph.jobs.job import Job
    from oomph.jobs.models import find_model, known_models
    from oomph.jobs.sources import job_from_config, job_from_factory, job_from_name
    from oomph.plans.choices import Choices
    from oomph.plans.fidelity import Fidelity
    from oomph.plans.ledgers import Ledgers
    from oomph.plans.plan import Change, Plan
    from oomph.precision.controller import AdaptivePrecision, PrecisionEvent
    from oomph.precision.report import PrecisionReport
    from oomph.rehearsal.estimation import Estimate, estimate
    from oomph.rehearsal.phases import rehearse
    from oomph.rehearsal.timeline import Block, Category, Timeline
    from oomph.runs.batches import Batches
    from oomph.runs.elastic import Elastic, Event
    from oomph.runs.inference import (
        InferencePlan,
        InferenceRun,
        apply_inference,
        plan_inference,
    )
    from oomph.runs.loading import Checkpoint, Resumed, load_checkpoint
    from oomph.runs.run import Run, apply, fit, resume
    from oomph.search.best_cards import BestCards, best_cards
    from oomph.search.cards import CardSurvey, CardVerdict, survey_cards
    from oomph.search.largest_planned import PlannedLimit, largest_planned
    from oomph.search.limits import Limit, largest
    from oomph.search.planner import plan

#: Where each public name lives. It is imported when first used: `oomph --help` needs no torch.
_HOMES = {
    "errors": (
        "BadCheckpoint",
        "BadInput",
        "CannotRehearse",
        "DiskDamaged",
        "DiskFull",
        "DoesNotFit",
        "HostMemoryFull",
        "HostTooSmall",
        "MissingExtra",
        "OomphError",
        "OutOfMemory",
        "RunBusy",
        "StalePlan",
        "StepBroken",
        "UnknownName",
        "WrongCheckpoint",
    ),
    "data.batch_shapes": ("in_shape",),
    "data.loader": ("Loader",),
    "data.packed_rows": (
        "PackedDataset",
        "block_diagonal_mask",
        "check_packing",
        "for_flash_attention",
    ),
    "data.packing": ("PackedBatches",),
    "data.padding": ("pad_samples",),
    "data.prefetch": ("Prefetcher",),
    "data.prefetch_memory": ("prefetched_bytes",),
    "data.token_batches": ("TokenBatches",),
    "data.token_limit": ("tokens_that_fit",),
    "data.waste": ("Waste",),
    "data.worker_tuning": ("TunedWorkers", "tune_workers"),
    "advising.advice": ("Advice", "advise"),
    "rehearsal.estimation": ("Estimate", "estimate"),
    "explaining.comparing": ("Comparison", "compare"),
    "explaining.explanation": ("Explanation", "explain"),
    "explaining.watching": ("watch",),
    "hardware": ("GPU", "find_gpu", "known_gpus"),
    "jobs.job": ("Job",),
    "jobs.sources": ("job_from_config", "job_from_factory", "job_from_name"),
    "jobs.models": ("find_model", "known_models"),
    "search.best_cards": ("BestCards", "best_cards"),
    "search.cards": ("CardSurvey", "CardVerdict", "survey_cards"),
    "search.largest_planned": ("PlannedLimit", "largest_planned"),
    "search.limits": ("Limit", "largest"),
    "search.planner": ("plan",),
    "plans.choices": ("Choices",),
    "plans.fidelity": ("Fidelity",),
    "plans.ledgers": ("Ledgers",),
    "plans.plan": ("Change", "Plan"),
    "precision.controller": ("AdaptivePrecision", "PrecisionEvent"),
    "precision.report": ("PrecisionReport",),
    "rehearsal.phases": ("rehearse",),
    "rehearsal.timeline": ("Block", "Category", "Timeline"),
    "runs.batches": ("Batches",),
    "runs.elastic": ("Elastic", "Event"),
    "engine.evaluating": ("Evaluation",),
    "runs.inference": ("InferencePlan", "InferenceRun", "apply_inference", "plan_inference"),
    "runs.loading": ("Checkpoint", "Resumed", "load_checkpoint"),
    "runs.run": ("Run", "apply", "fit", "resume"),
}

__all__ = [
    "GPU",
    "AdaptivePrecision",
    "Advice",
    "BadCheckpoint",
    "BadInput",
    "Batches",
    "BestCards",
    "Block",
    "CannotRehearse",
    "CardSurvey",
    "CardVerdict",
    "Category",
    "Change",
    "Checkpoint",
    "Choices",
    "Comparison",
    "DiskDamaged",
    "DiskFull",
    "DoesNotFit",
    "Elastic",
    "Estimate",
    "Evaluation",
    "Event",
    "Explanation",
    "Fidelity",
    "HostMemoryFull",
    "HostTooSmall",
    "InferencePlan",
    "InferenceRun",
    "Job",
    "Ledgers",
    "Limit",
    "Loader",
    "MissingExtra",
    "OomphError",
    "OutOfMemory",
    "PackedBatches",
    "PackedDataset",
    "Plan",
    "PlannedLimit",
    "PrecisionEvent",
    "PrecisionReport",
    "Prefetcher",
    "Resumed",
    "Run",
    "RunBusy",
    "StalePlan",
    "StepBroken",
    "Timeline",
    "TokenBatches",
    "TunedWorkers",
    "UnknownName",
    "Waste",
    "WrongCheckpoint",
    "advise",
    "apply",
    "apply_inference",
    "best_cards",
    "block_diagonal_mask",
    "check_packing",
    "compare",
    "estimate",
    "explain",
    "find_gpu",
    "find_model",
    "fit",
    "for_flash_attention",
    "in_shape",
    "job_from_config",
    "job_from_factory",
    "job_from_name",
    "known_gpus",
    "known_models",
    "largest",
    "largest_planned",
    "load_checkpoint",
    "pad_samples",
    "plan",
    "plan_inference",
    "prefetched_bytes",
    "rehearse",
    "resume",
    "survey_cards",
    "tokens_that_fit",
    "tune_workers",
    "watch",
]


load_with(lambda: import_module("oomph.report.renderers"))
load_techniques_with(lambda: import_module("oomph.techniques.builtin"))


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(f"oomph.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'oomph' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
