"""Jobs: what they consist of, where they come from, and their repeated blocks."""
