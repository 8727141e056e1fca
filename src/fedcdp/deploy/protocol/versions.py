"""Versions of the protocol: each side says which it speaks when a client subscribes, and refuses what it does not speak.

| version | spoken by | what changed |
| --- | --- | --- |
| 1 | fedcdp 0.1.0, which says nothing of versions | |
| 2 | later releases | `query.keys` says which keys are kept, and carries rotated node keys; versions are said |

A side speaks all versions from `OLDEST` to `PROTOCOL`. Two sides understand each other if these ranges meet, so a federation
is upgraded one side at a time, in any order, as long as no version is skipped. A message outside the range is refused with a
sentence that says which side to upgrade. What a task means is not versioned here: a side that does not know an option of a
plan refuses the task by its written form (`task`).
"""

from __future__ import annotations

from typing import Any

from flwr.app import ConfigRecord

from fedcdp._version import __version__
from fedcdp.files.untrusted import printable

PROTOCOL = 2
OLDEST = 1
_LONGEST_PROGRAM = 40


def spoken() -> dict[str, Any]:
    """What a side says of itself."""
    return {"protocol": PROTOCOL, "oldest": OLDEST, "program": __version__}


def misunderstanding(other: ConfigRecord | None, whose: str) -> str | None:
    """Why the other side, a `server` or a `node`, is not understood; None if it is. Saying nothing means version 1."""
    said: dict[str, Any] = {} if other is None else dict(other)
    newest, oldest, program = said.get("protocol", 1), said.get("oldest", 1), said.get("program", "0.1.0")
    numbers = type(newest) is int and type(oldest) is int and 1 <= oldest <= newest
    if not (numbers and isinstance(program, str)):
        return f"the {whose} states no valid version"
    if oldest <= PROTOCOL and newest >= OLDEST:
        return None
    mine = "node" if whose == "server" else "server"
    behind = mine if oldest > PROTOCOL else whose
    return (
        f"the {whose} runs fedcdp {printable(program[:_LONGEST_PROGRAM])} and speaks versions {oldest} to {newest} of the "
        f"protocol; this {mine} runs {__version__} and speaks {OLDEST} to {PROTOCOL}: upgrade the {behind}"
    )
