"""Runs a job's real step on fake tensors: sees every allocation and free, needs no GPU."""
