"""Devices: whether one can be used, how many threads it takes, and when it is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedcdp.errors import PlanError


def usable_device(device: str | torch.device) -> torch.device:
    """The device, or a sentence that says it is not there."""
    try:
        torch.zeros(1, device=device).item()
        return torch.device(device)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise PlanError(f"device: {device} cannot be used: {reason}") from None


def wait(device: torch.device) -> None:
    """Until everything that a device was asked for is done: a GPU is asked, and works on its own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch computes with one thread; afterwards with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
