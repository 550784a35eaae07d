"""A job's real step on fake tensors: every allocation and free, with no GPU."""
