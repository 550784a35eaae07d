"""Models by name or by config file: what to build, how to build it, and a batch to train it on.

`building` needs torch and is imported separately, so that names can be listed without torch.
"""

from oomph.jobs.models.batches import sample_batch, task_kind, usual_length
from oomph.jobs.models.catalogue import ModelEntry, find_model, known_models

__all__ = [
    "ModelEntry",
    "find_model",
    "known_models",
    "sample_batch",
    "task_kind",
    "usual_length",
]
