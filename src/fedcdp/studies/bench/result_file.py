"""The result file of a bench: measurements and their machine, written completely after every group of measurements."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from fedcdp._version import __version__
from fedcdp.errors import RunError
from fedcdp.files.disk import write_atomically
from fedcdp.files.untrusted import MOST_JSON, parse_json, read_bounded
from fedcdp.training.autotune import machine

FORMAT = "fedcdp-bench-1"

Rows = list[dict[str, Any]]


class BenchResults:
    """Rows by section. With a path, rows are on disk as soon as they are added.

    An existing file is completed: a section that is measured again replaces the old one. A file measured on another machine,
    or with another version, is refused.
    """

    def __init__(self, machine: dict[str, Any], path: Path | None = None) -> None:
        self.path = path
        self.machine = machine
        self.sections: dict[str, Rows] = {}
        if path is not None and os.path.lexists(path):
            content = read(path)
            if content["machine"] != machine:
                raise RunError(f"--out: {path} was measured on another machine or version; choose another file")
            self.sections = content["sections"]
        if path is not None:
            self._write()  # fail before measuring if the file cannot be written

    def begin(self, section: str) -> None:
        """Remove the earlier measurements of a section."""
        self.sections[section] = []

    def add(self, section: str, rows: Rows) -> None:
        """Add measurements, and save them."""
        self.sections[section] += rows
        if self.path is not None:
            self._write()

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {"format": FORMAT, "machine": self.machine, "sections": self.sections}

    def _write(self) -> None:
        if self.path is None:
            return
        try:
            write_atomically(self.path, (json.dumps(self.as_json(), indent=1) + "\n").encode())
        except OSError as error:
            raise RunError(f"--out: {self.path} cannot be written: {error.strerror}") from error


def read(path: Path) -> dict[str, Any]:
    """Read a result file; raises an error that says what is wrong with it."""
    try:
        content = parse_json(read_bounded(path, MOST_JSON))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError:
        raise RunError(f"{path} is not a result file of fedcdp bench") from None
    sections = content.get("sections") if isinstance(content, dict) and content.get("format") == FORMAT else None
    if not isinstance(sections, dict) or "machine" not in content:
        raise RunError(f"{path} is not a result file of fedcdp bench")
    found: dict[str, Any] = content
    return found


def describe(device: torch.device) -> dict[str, Any]:
    """What speed depends on besides the training; the same for every measurement on this machine."""
    return {
        "device": device.type,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cpu": machine(torch.device("cpu"))["device"],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fedcdp": __version__,
    }


def load_average() -> float | None:
    """The number of processes that wanted a core during the last minute; far above 1, it warns of other load."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
