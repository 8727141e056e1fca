"""The memory that a training needs at its peak, by a process of its own: a process cannot forget its peak.

python -m fedcdp.studies.bench.peak_memory < case.json
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fedcdp.config.experiment import MachineSettings
from fedcdp.errors import DefectError
from fedcdp.studies.bench.timing import Case, synthetic, visit

_MIB = 2**20
_UNIT = 1 if sys.platform == "darwin" else 2**10  # of ru_maxrss


def peak_mib(case: Case, local_steps: int) -> dict[str, float]:
    """MiB of a process at its peak, and before training: with the libraries and the (synthetic) data alone."""
    asked = {
        "dataset": case.subject.name,
        "machine": vars(case.machine),
        "plan": case.plan,
        "clients": case.clients,
        "local_steps": local_steps,
    }
    done = subprocess.run(
        [sys.executable, "-m", "fedcdp.studies.bench.peak_memory"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    if done.returncode:
        raise DefectError(f"the memory of {case.name} could not be measured: {done.stderr.strip().rpartition(chr(10))[2]}")
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def _own_peak() -> float:
    # Linux counts the parent's memory in a child's ru_maxrss, but not in this.
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return round(int(line.split()[1]) / 2**10, 1)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT / _MIB, 1)


def _answer(asked: dict[str, Any]) -> dict[str, float]:
    torch.set_num_threads(1)
    subject, machine = synthetic(asked["dataset"]), MachineSettings(**asked["machine"])
    before = _own_peak()
    visit(Case("memory", subject, machine, asked["plan"], asked["clients"]), asked["local_steps"])
    return {"before_mib": before, "peak_mib": _own_peak()}


if __name__ == "__main__":
    print(json.dumps(_answer(json.load(sys.stdin))))
