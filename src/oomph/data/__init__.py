"""Data for a run: batches by tokens, packed rows, and the way to the device."""
