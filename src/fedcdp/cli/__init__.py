"""The command line: parses, calls the library, prints. No logic."""


def main() -> None:
    """Run the command line."""
    from fedcdp.cli.program import main as run  # late: what it imports takes seconds

    run()


__all__ = ["main"]
