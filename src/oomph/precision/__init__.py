"""Adaptive precision: each layer's number format follows the model's behaviour."""
