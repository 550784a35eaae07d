"""A job with a plan applied: steps, adapting, saving, resuming, evaluating, inference."""
