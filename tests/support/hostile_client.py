"""A ClientApp as a hostile node might run it: what it sends is tampered with, in another way in every round.

The app of the test names this module; only the node whose environment says so is hostile.
"""

from __future__ import annotations

import os

import torch
from flwr.app import ConfigRecord, RecordDict

from fedcdp.deploy.protocol import messages, wire
from fedcdp.deploy.protocol.local_round import Round
from fedcdp.files.tree import Layout
from fedcdp.flower.app import client

__all__ = ["client"]

_honest = messages.reply


def _tampered(task: str, asked: Round, sent: messages.Update, layout: Layout) -> RecordDict:
    def times(factor: float) -> messages.Update:
        return messages.Update({name: value * factor for name, value in sent.update.items()}, None)

    first = next(iter(sent.update))
    if asked.number == 0:
        return _honest(
            task, asked, messages.Update({name: value * torch.nan for name, value in sent.update.items()}, None), layout
        )
    if asked.number == 1:
        wrong = sent.update | {first: torch.zeros(3, 3, 3)}
        about = ConfigRecord({"task": task, "round": asked.number, "attempt": asked.attempt})
        return RecordDict({"update": wire.dense(wrong), "about": about})
    if asked.number == 2:
        return _honest(
            task, asked, messages.Update({name: value * 1e6 for name, value in sent.update.items()}, None), layout
        )
    if asked.number == 3:
        return _honest(task, Round(asked.number - 1, asked.attempt, asked.clip), sent, layout)
    raise RuntimeError("and in the end it breaks down")


if os.environ.get("FEDCDP_TEST_HOSTILE") == "yes":
    messages.reply = _tampered
