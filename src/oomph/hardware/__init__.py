"""GPUs by name: their memory and their speed."""

from oomph.hardware.catalogue import GPU, find_gpu, known_gpus

__all__ = ["GPU", "find_gpu", "known_gpus"]
