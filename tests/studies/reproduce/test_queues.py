"""Ranks share the cells of a table: each is measured once, rank 0 keeps every row, and nobody waits for a lost rank."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from fedcdp.errors import FedcdpError, LostRankError, RunError
from fedcdp.studies.reproduce import queues
from fedcdp.studies.reproduce.catalogue import Cell, Table
from fedcdp.studies.reproduce.queues import OwnQueue, RanksQueue
from fedcdp.training.ranks import Ranks
from tests.support.rank_jobs import ended_on_ranks, on_ranks


def cells(count: int = 7) -> list[Cell]:
    table = Table("tiny", {
        "title": "Tiny", "layout": "accuracy", "every": {"data": {"dataset": "cancer"}},
        "axes": {"steps": {f"L{number}": {"plan.local_steps": number} for number in range(1, count + 1)}},
    })  # fmt: skip
    return list(table.cells.values())


def worked(rank: int, *, seconds: float = 30.0, kept: list[Any] | None = None) -> tuple[list[str], Any, list[str]]:
    """The names that this rank took, the rows that it kept, and those that are left or failed."""
    ranks, rows = Ranks.present(), {} if kept is None else kept
    with ranks.joined():
        queue = RanksQueue(ranks, cells(), lambda cell, row: rows.update({cell.name: row}), time.monotonic() + seconds)
        taken = []
        while (cell := queue.take()) is not None:
            taken.append(cell.name)
            time.sleep(0.05)
            if cell.name == "L3":
                queue.failed(cell, "not today")
            else:
                queue.done(cell, {"by": rank, "accuracy": 0.1 + 0.2})
            queue.tend()
        outcome = queue.finish()
    return taken, rows, [cell.name for cell in outcome.left] + list(outcome.failed)


def test_each_cell_is_taken_once_and_rank_0_keeps_all_rows() -> None:
    names = [cell.name for cell in cells()]
    ended = on_ranks(3, worked)
    assert sorted(name for taken, _, _ in ended for name in taken) == names
    assert [rows for _, rows, _ in ended[1:]] == [{}, {}]
    (_, rows, failed) = ended[0]
    assert sorted(rows) == [name for name in names if name != "L3"]
    assert failed == ["L3"]
    for rank, (taken, _, _) in enumerate(ended):
        assert all(rows[name] == {"by": rank, "accuracy": 0.1 + 0.2} for name in taken if name != "L3")


def test_no_cell_begins_after_the_deadline() -> None:
    first, second = on_ranks(2, lambda rank: worked(rank, seconds=0))
    assert first == ([], {}, [cell.name for cell in cells()])
    assert second[:2] == ([], {})
    queue = OwnQueue(cells(), lambda *_: None, time.monotonic())
    assert queue.take() is None
    assert len(queue.finish().left) == 7


@pytest.mark.parametrize("victim", [0, 1])
def test_a_silent_rank_is_lost(victim: int) -> None:
    def work(rank: int) -> Any:
        queues.SILENCE = 1.0
        if rank == victim:
            real = RanksQueue.done

            def die(*arguments: Any) -> None:
                real(*arguments)
                os._exit(9)

            RanksQueue.done = die  # type: ignore[method-assign]
        return worked(rank)

    ended = ended_on_ranks(2, work)
    assert ended.pop(victim).status == 9
    (other,) = ended
    assert type(other.error) is LostRankError
    assert "so this job ends" in str(other.error)


def test_an_error_of_rank_0_ends_all() -> None:
    """A full disk, for instance, where a row is to be kept."""

    def work(rank: int) -> Any:
        class Full(dict[str, Any]):
            def update(self, *_: Any) -> None:
                raise RunError("out: it is full")

        return worked(rank, kept=Full())  # type: ignore[arg-type]

    first, second = ended_on_ranks(2, work)
    assert type(first.error) is RunError
    assert isinstance(second.error, FedcdpError)
    assert str(second.error) == "out: it is full"
