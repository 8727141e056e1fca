"""`python -m fedcdp` is the command line."""

from fedcdp.cli import main

main()
