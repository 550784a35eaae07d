"""Data for a run: batches by tokens, packed rows, and prefetching to the device."""
