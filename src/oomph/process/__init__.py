"""Changes to this process: signal handling, random state, functions replaced per thread."""
