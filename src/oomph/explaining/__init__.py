"""Explains why memory ran out, and what files about memory say."""
