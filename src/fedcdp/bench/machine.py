"""The machine that was measured, in words."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

import fedcdp
from fedcdp.engine.choice import machine


def describe(device: torch.device) -> dict[str, Any]:
    """What a speed depends on besides what is trained; the same for every measurement on this machine."""
    return {
        "device": device.type,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cpu": machine(torch.device("cpu"))["device"],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fedcdp": fedcdp.__version__,
    }


def load_average() -> float | None:
    """How many processes wanted a core during the last minute; a figure far above 1 warns that others were at work."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
