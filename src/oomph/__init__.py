"""oomph: makes any PyTorch model fit in the GPU memory you have."""
