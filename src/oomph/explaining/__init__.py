"""Why memory ran out, and what a file about memory says."""
