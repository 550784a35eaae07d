"""Memory over time in the formats of other programs."""
