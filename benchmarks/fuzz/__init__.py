"""Damaged files for all that reads files: each is loaded, or refused with an `OomphError`."""
