"""Flower's SuperNode, which looks for messages more often. It handles none itself (`warm_node` does).

A SuperNode pauses for three seconds between two looks, and for half a second while it waits for an answer. Neither can be
set. This program runs `flower-supernode` with shorter pauses, until the process that started it ends.

It is run as a file and imports nothing of fedcdp: without torch, it needs a third of the memory.
"""

from __future__ import annotations

import signal
import sys
import time
from types import SimpleNamespace


def main(parent: int, pause: float, arguments: list[str]) -> None:
    """Run `flower-supernode` with these arguments, while the process `parent` lives."""
    from flwr.supercore.app_utils import start_parent_process_monitor
    from flwr.supernode import start_client_internal as loop
    from flwr.supernode.cli.flower_supernode import flower_supernode

    def sleep(seconds: float) -> None:
        time.sleep(min(seconds, pause))

    setattr(loop, "time", SimpleNamespace(sleep=sleep))  # noqa: B010 (not a module, so no type checker takes it)
    for number in (signal.SIGINT, signal.SIGTERM):
        # Flower replaces these handlers, and restores them after the first signal: a second one must not cut its farewell.
        signal.signal(number, signal.SIG_IGN)
    start_parent_process_monitor(parent)
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
