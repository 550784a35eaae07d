"""Differences between CUDA and the CPU, where the fake tensors are."""
