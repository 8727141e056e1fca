"""Devices: whether one can be used, and when it is done."""

from __future__ import annotations

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
