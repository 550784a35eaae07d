"""From a job and a budget to a plan: options, seconds, solver, and the check of every plan."""
