"""Adaptive precision: each layer's number format follows how the model behaves."""
