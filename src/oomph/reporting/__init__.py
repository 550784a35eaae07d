"""Results as people read them: on a terminal, in a pipe, in a notebook."""
