"""GPUs: what a card can hold and how fast it is, by name."""

from oomph.gpus.catalogue import GPU, find_gpu, known_gpus

__all__ = ["GPU", "find_gpu", "known_gpus"]
