"""`python -m fedcdp` runs the command line."""

from fedcdp.cli import main

main()
