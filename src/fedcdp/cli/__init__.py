"""The command line: parses, calls the library, prints. No logic."""

from fedcdp.cli.program import main

__all__ = ["main"]
