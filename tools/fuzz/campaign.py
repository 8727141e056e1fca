"""Try to break the program with hostile input: a number of cases per target, each reproducible by its number.

python -m tools.fuzz --cases 10000 --out results/reliability/fuzz.json
python -m tools.fuzz --target task --first 4711 --cases 1      # repeat one case
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tools.fuzz import commands, data, deployment, reports, runs, tables, whole_commands
from tools.fuzz.watch import MEBIBYTES, SECONDS, Watch

Attempt = Callable[[Random, Path], None]
TARGETS: dict[str, Callable[[Path], Attempt]] = {
    **commands.TARGETS,
    **runs.TARGETS,
    **data.TARGETS,
    **tables.TARGETS,
    **reports.TARGETS,
    **deployment.TARGETS,
}


_IN_WORDS = ("command line", "whole commands")  # these report a refusal on the console


@dataclass
class Outcome:
    """The results of one target's cases."""

    cases: int = 0
    refused: int = 0
    """Refused with the program's own error; the other cases were accepted as valid input."""
    seconds: float = 0.0
    findings: dict[int, str] = field(default_factory=dict)
    """By case number."""


def campaign(target: str, cases: int, place: Path, watch: Watch, first: int = 0) -> Outcome:
    """Run the cases of a target, starting with `first`."""
    attempt = TARGETS[target](place)
    outcome = Outcome()
    started = time.perf_counter()
    for number in range(first, first + cases):
        counted = _Counting(attempt)
        finding = watch.run(counted, Random(f"{target}/{number}"))
        outcome.cases += 1
        outcome.refused += counted.refused
        if finding is not None:
            outcome.findings[number] = finding
    outcome.seconds = time.perf_counter() - started
    return outcome


def processes(cases: int, place: Path, first: int = 0) -> Outcome:
    """Run whole commands, each in its own process."""
    outcome, started = Outcome(), time.perf_counter()
    for number in range(first, first + cases):
        outcome.cases += 1
        if (finding := whole_commands.attempt(Random(f"whole commands/{number}"), place)) is not None:
            outcome.findings[number] = finding
    outcome.seconds = time.perf_counter() - started
    return outcome


class _Counting:
    """An attempt that records whether it was refused."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt, self.refused = attempt, False

    def __call__(self, case: Random, place: Path) -> None:
        from fedcdp.errors import FedcdpError

        try:
            self._attempt(case, place)
        except FedcdpError:
            self.refused = True
            raise


def main() -> None:
    """Run a campaign, print the results, and store them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--target", action="append", choices=sorted(TARGETS))
    parser.add_argument("--processes", type=int, default=0, help="number of whole commands, each in its own process")
    parser.add_argument("--out", type=Path, help="result file; an existing one is completed")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch).resolve() / "place"
        place.mkdir()
        prepare(place)
        watch = Watch(place)
        outcomes = {}
        for target in given.target or (TARGETS if given.cases else ()):
            outcomes[target] = campaign(target, given.cases, place, watch, given.first)
            tell(target, outcomes[target])
        if given.processes:
            outcomes["whole commands"] = processes(given.processes, place, given.first)
            tell("whole commands", outcomes["whole commands"])
    if given.out:
        keep(given.out, outcomes)
    sys.exit(1 if any(each.findings for each in outcomes.values()) else 0)


def prepare(place: Path) -> None:
    """Use no data directory, and a cache only here."""
    os.environ.pop("FEDCDP_DATA", None)
    os.environ["FEDCDP_CACHE"] = str(place / "cache")
    os.environ["COLUMNS"] = "100"
    os.environ["MPLCONFIGDIR"] = str(place / "matplotlib")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(place / "inductor")


def tell(target: str, outcome: Outcome) -> None:
    """Print a line about a target, and each kind of finding once."""
    kinds = Counter(finding.splitlines()[0][:60] + finding.splitlines()[-1] for finding in outcome.findings.values())
    print(
        f"{target}: {outcome.cases} cases, {outcome.refused} refused, {outcome.seconds:.0f} s, "
        f"{len(outcome.findings)} findings"
    )
    seen: set[str] = set()
    for number, finding in outcome.findings.items():
        kind = finding.splitlines()[0][:60] + finding.splitlines()[-1]
        if kind not in seen:
            seen.add(kind)
            print(f"  case {number} (and {kinds[kind] - 1} like it): {finding}")
    sys.stdout.flush()


def keep(path: Path, outcomes: dict[str, Outcome]) -> None:
    """Write or complete the record."""
    known = json.loads(path.read_bytes())["targets"] if path.exists() else {}
    content = {
        "command": "make fuzz",
        "python": platform.python_version(),
        "limits": {"seconds a case": SECONDS, "MiB a case": MEBIBYTES},
        "targets": known
        | {
            name: {
                "cases": each.cases,
                "refused": None if name in _IN_WORDS else each.refused,
                "findings": len(each.findings),
                "seconds": round(each.seconds),
            }
            for name, each in outcomes.items()
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
