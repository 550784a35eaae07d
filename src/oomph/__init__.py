"""oomph: makes any PyTorch model fit in the GPU memory you have.

import oomph
print(oomph.estimate(job, gpu="rtx-4090"))
"""

from oomph.errors import BadInput, CannotRehearse, MissingExtra, OomphError, UnknownName
from oomph.estimate import Estimate, Ledgers, estimate
from oomph.gpus import GPU, find_gpu, known_gpus
from oomph.job import Job
from oomph.job_sources import job_from_config, job_from_factory, job_from_name
from oomph.rehearsal.phases import rehearse
from oomph.rehearsal.timeline import Block, Category, Timeline

__all__ = [
    "GPU",
    "BadInput",
    "Block",
    "CannotRehearse",
    "Category",
    "Estimate",
    "Job",
    "Ledgers",
    "MissingExtra",
    "OomphError",
    "Timeline",
    "UnknownName",
    "estimate",
    "find_gpu",
    "job_from_config",
    "job_from_factory",
    "job_from_name",
    "known_gpus",
    "rehearse",
]
