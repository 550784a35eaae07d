"""Timing: predicts how long an op takes on a GPU."""
