"""Techniques: one way to need less memory each, one file each."""
