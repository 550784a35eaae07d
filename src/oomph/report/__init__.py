"""Render results for people: on a terminal, in a pipe, in a notebook."""
