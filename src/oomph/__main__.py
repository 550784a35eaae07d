"""`python -m oomph`."""

from oomph.cli import main

main()
