"""All private PyTorch names that oomph uses, by area; the rest of oomph imports them from here.

Each module says in `NAMES` what its names are for and what breaks without them; a test checks that
they exist and work as described. This package imports nothing else from oomph.
"""
