"""Programs that hold what oomph says against what was measured; each prints its table."""
