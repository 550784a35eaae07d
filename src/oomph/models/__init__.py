"""Models by name or by config file: what to build, how to build it, and a batch to train it on."""

from oomph.models.batches import sample_batch, task_kind, usual_length
from oomph.models.building import build_config, build_model, model_class, model_from_config_path
from oomph.models.catalogue import ModelEntry, find_model, known_models

__all__ = [
    "ModelEntry",
    "build_config",
    "build_model",
    "find_model",
    "known_models",
    "model_class",
    "model_from_config_path",
    "sample_batch",
    "task_kind",
    "usual_length",
]
