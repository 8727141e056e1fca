"""Several ranks of one job, in forks of the test's process: they start at once, and connect over the loopback."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

PATIENCE = 60.0


@dataclass(frozen=True)
class Ended:
    """How a rank ended: what its function returned, or the error that it raised; neither if it was killed."""

    status: int
    result: Any = None
    error: BaseException | None = None


def on_ranks(size: int, function: Callable[[int], Any]) -> list[Any]:
    """What a function of the rank returns on each rank of a process group; an error of any rank is raised."""
    ended = ended_on_ranks(size, function)
    for each in ended:
        if each.error is not None:
            raise each.error
    return [each.result for each in ended]


def ended_on_ranks(size: int, function: Callable[[int], Any]) -> list[Ended]:
    """The same, with how each of the ranks ended. A test that waits for a lost rank fails here."""
    with tempfile.TemporaryDirectory() as place:

        def work(rank: int) -> None:
            dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=size)
            try:
                found = Ended(0, function(rank))
            except Exception as error:
                found = Ended(1, error=error)
            (Path(place) / str(rank)).write_bytes(pickle.dumps(found))

        statuses = _forked(size, work)
        results = [Path(place) / str(rank) for rank in range(size)]
        return [
            pickle.loads(path.read_bytes()) if path.exists() else Ended(status)
            for status, path in zip(statuses, results, strict=True)
        ]


def commands_on_ranks(*commands: list[str]) -> list[tuple[int, str, str]]:
    """The status and the output of `fedcdp` on each rank of a job, with the environment that torchrun sets."""
    port = free_port()
    with tempfile.TemporaryDirectory() as place:

        def work(rank: int) -> None:
            from fedcdp.cli.program import main

            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(Path(place) / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT), number)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(commands)),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
            sys.argv = ["fedcdp", *commands[rank]]
            main()

        statuses = _forked(len(commands), work)
        said = [[(Path(place) / f"{rank}.{name}").read_text() for name in ("out", "err")] for rank in range(len(commands))]
        return [(status, *each) for status, each in zip(statuses, said, strict=True)]


def free_port() -> int:
    """A port of the loopback that nobody uses now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _forked(size: int, work: Callable[[int], None]) -> list[int]:
    """The exit status of each fork."""

    def main(rank: int) -> None:
        status = 70
        try:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            work(rank)
            status = 0
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    ranks = [multiprocessing.get_context("fork").Process(target=main, args=(rank,), daemon=True) for rank in range(size)]
    for process in ranks:
        process.start()
    try:
        for rank, process in enumerate(ranks):
            process.join(PATIENCE)
            assert process.exitcode is not None, f"rank {rank} did not end"
        return [process.exitcode or 0 for process in ranks]
    finally:
        for process in ranks:
            process.kill()
