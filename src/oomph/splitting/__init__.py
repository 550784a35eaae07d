"""Proves, from the graph of the job's forward, whether a batch may be split into micro-batches."""

from oomph.splitting.prove import prove_split, prove_split_of_another
from oomph.splitting.skeleton import catch_up, skeleton

__all__ = ["catch_up", "prove_split", "prove_split_of_another", "skeleton"]
