"""Timing: how long an op takes on a card, before anyone has run it."""
