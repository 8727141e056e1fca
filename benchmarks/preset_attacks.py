"""Attack every recommended preset as each reader, and write the figures for docs/recommended.md.

    python -m benchmarks.preset_attacks                           # results/preset_attacks.json
    python -m benchmarks.preset_attacks --presets cancer-eps1     # single presets; --readers: single readers
    python -m benchmarks.preset_attacks --victims 20              # fewer of type2 than the command's own number
    python -m benchmarks.preset_attacks --table > results/preset_attacks.md
    python -m tools.pages                                         # the page

| reader | what it reads | attack |
| --- | --- | --- |
| `type2` | the gradient of every record, in all rounds | the default one, which reconstructs and identifies |
| `type1` | a client's update before it leaves the client, in all rounds | the same |
| `type0` | the sum that the server receives in all rounds | the same; not for sums of more than 1,000 records |
| `presence` | what the server receives in the first round | the matched filter: is a record in there? |

A server that reads each update reads what `type1` does: there, the two are one cell. Each cell is one `fedcdp attack`
command, run by the code of the command line; with one worker all run in this process, where the readers of a preset share
one training. Stored cells are not computed again. A cell of `presence` also has the AUC over all
rounds by the formula of the matched filter (`auc_all_rounds`), as if a record changed each round as much as the first. The
rounds are Gaussian releases, so the distance between the two worlds grows with the square root of their number.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.attack_matrix import run_program
from benchmarks.clean_tree import clean_commit
from benchmarks.recommended import multiplier
from fedcdp.attacks.cohort import MOST_RECORDS
from fedcdp.config.presets import RECOMMENDED

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "preset_attacks.json"
PRESETS = tuple(name for name in RECOMMENDED if not name.startswith("mnist-10k"))
READERS = ("type2", "type1", "type0", "presence")


@dataclass(frozen=True)
class Cell:
    """One attack on one preset."""

    preset: str
    reader: str
    options: str = ""
    victims: int | None = None

    @property
    def key(self) -> str:
        return "/".join((self.preset, self.reader, *self.options.split()[1:]))

    @property
    def command(self) -> str:
        words = f"attack --preset {self.preset}"
        if self.reader == "presence":
            return f"{words} --leak type0 --attack matched-filter"
        fewer = "" if self.victims is None else f"--victims {self.victims}"
        return " ".join(each for each in (words, f"--leak {self.reader}", self.options, fewer) if each)


def cells(presets: tuple[str, ...], victims: int | None = None) -> list[Cell]:
    """Every cell of these presets; noise on the batch alone stands beside the noise of `mnist-eps1`."""
    named = [(preset, reader, "") for preset in presets for reader in READERS if _reconstructed(preset, reader)]
    if "mnist-eps1" in presets:
        named += [("mnist-eps1", leak, "--noise batch") for leak in ("type2", "type1")]
    return [Cell(preset, reader, options, victims if reader == "type2" else None) for preset, reader, options in named]


def _reconstructed(preset: str, reader: str) -> bool:
    return reader != "type0" or (RECOMMENDED[preset].on_sum and _summed(preset) <= MOST_RECORDS)


def _summed(preset: str) -> int:
    """How many records the sum of a round holds."""
    return RECOMMENDED[preset].federated.clients * RECOMMENDED[preset].federated.records


def measure(cell: Cell, device: str, origin: dict[str, str]) -> dict[str, Any]:
    """Run a cell's command in this process."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    row = run_program(shlex.split(cell.command), device)
    if "refused" in row:
        raise RuntimeError(f"{cell.command}: {row['refused']}")
    seconds = round(time.perf_counter() - started, 1)
    about = {"command": f"fedcdp {cell.command} --device {device} --json", "wall_seconds": seconds}
    found: dict[str, Any] = origin | about | row
    if cell.reader == "presence":
        found["auc_all_rounds"] = after(found["auc_predicted"], RECOMMENDED[cell.preset].found.rounds)
    return found


def after(auc: float, releases: int) -> float:
    """The AUC of a likelihood-ratio test on this many Gaussian releases, from the AUC on one."""
    normal = statistics.NormalDist()
    return normal.cdf(math.sqrt(releases) * normal.inv_cdf(auc))


def run(wanted: list[Cell], device: str, workers: int, commit: str, out: Path) -> int:
    """Measure all cells that are not stored, several at a time; the number that failed."""
    stored = json.loads(out.read_text())["cells"] if out.exists() else {}
    origin, failed = {"commit": commit, "machine": _machine(device)}, 0
    missing = [cell for cell in wanted if cell.key not in stored]
    for cell, row in _measured(missing, device, workers, origin):
        if isinstance(row, Exception):
            failed += 1
            print(f"{cell.key}: {type(row).__name__}: {row}", flush=True)
            continue
        stored[cell.key] = row
        names = ("attack", "label_accuracy", "recognisable_rate", "identified_rate", "auc", "auc_all_rounds")
        print(f"{row['wall_seconds']:6.0f} s  {cell.key}  { ({name: row.get(name) for name in names}) }", flush=True)
        out.write_text(json.dumps({"cells": dict(sorted(stored.items()))}, indent=1) + "\n")
    return failed


def _measured(
    missing: list[Cell], device: str, workers: int, origin: dict[str, str]
) -> Iterator[tuple[Cell, dict[str, Any] | Exception]]:
    """Each cell with its row, or with the reason why it failed: one after the other here, or several in processes."""
    if workers == 1:
        for cell in missing:
            try:
                yield cell, measure(cell, device, origin)
            except Exception as error:
                yield cell, error
        return
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        running = {pool.submit(measure, cell, device, origin): cell for cell in missing}
        for done in as_completed(running):
            failure = done.exception()
            yield running[done], done.result() if failure is None else RuntimeError(str(failure))


def allowed(epsilon: float) -> float:
    """The largest AUC that a Gaussian mechanism of this ε, at the presets' δ, allows."""
    return statistics.NormalDist().cdf(1 / (multiplier(epsilon, 1, 1) * math.sqrt(2)))


def closeness(stored: dict[str, Any]) -> str:
    """For every ε of the presets: the server's AUC of presence, the most that ε allows, and how much of that is reached."""
    lines = [
        "| ε | the server reads | presets | presence AUC, all rounds | allowed by ε | advantage reached |",
        "| --- " * 6 + "|",
    ]
    of_kind: dict[tuple[float, bool], list[float]] = {}
    for name in PRESETS:
        if (found := stored.get(f"{name}/presence")) is not None:
            kind = RECOMMENDED[name].found.epsilon, RECOMMENDED[name].on_sum
            of_kind.setdefault(kind, []).append(found["auc_all_rounds"])
    for (epsilon, on_sum), measured in sorted(of_kind.items()):
        low, high, most = min(measured), max(measured), allowed(epsilon)
        reads, parts = "the sum" if on_sum else "each update", [(each - 0.5) / (most - 0.5) for each in (low, high)]
        shares = " to ".join(dict.fromkeys(f"{100 * part:.0f} %" for part in parts))
        aucs = " to ".join(dict.fromkeys(f"{each:.3f}".lstrip("0") for each in (low, high)))
        limit = f"{most:.3f}".lstrip("0")
        lines.append(f"| {epsilon:g} | {reads} | {len(measured)} | {aucs} | {limit} | {shares} |")
    return "\n".join(lines)


def markdown(stored: dict[str, Any]) -> str:
    """All stored cells as a table."""
    lines = [
        "# Attacks on the recommended presets",
        "",
        "`python -m benchmarks.preset_attacks` measures the cells, and `--table` writes this page.",
        "preset_attacks.json has the command, commit and machine of each cell.",
        "",
        "- type-2, type-1, type-0, in percent: labels right / recognisable (images) or reconstructed exactly (tables) /",
        "  identified among the candidates, of how many records. *The same*: that server reads what type-1 does.",
        f"  *Not tried*: `fedcdp attack` reconstructs no records from a sum of more than {MOST_RECORDS:,}.",
        "- A dash: not measured.",
        "- presence: the server's AUC over all rounds by the formula, and the largest AUC that ε allows.",
        "",
        "| preset | type-2 | type-1 | type-0 | presence, server | allowed |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in PRESETS:
        found = {reader: stored.get(f"{name}/{reader}") for reader in READERS}
        if not any(found.values()):
            continue
        shares = [_shares(found[reader]) for reader in READERS[:2]]
        shown = " | ".join([*shares, _server(name, found["type0"])])
        presence = f"{found['presence']['auc_all_rounds']:.3f}" if found["presence"] else "–"
        lines.append(f"| `{name}` | {shown} | {presence} | {allowed(RECOMMENDED[name].found.epsilon):.3f} |")
    return "\n".join(lines)


def _server(preset: str, cell: dict[str, Any] | None) -> str:
    """The cell of type-0."""
    if not RECOMMENDED[preset].on_sum:
        return "the same"
    return _shares(cell) if _reconstructed(preset, "type0") else f"not tried: {_summed(preset):,}"


def _shares(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "–"
    seen = cell["success_rate"] if cell["recognisable_rate"] is None else cell["recognisable_rate"]
    shares = " / ".join(f"{100 * each:.3g}" for each in (cell["label_accuracy"], seen, cell["identified_rate"]))
    return f"{shares} of {cell['examples']}"


def _machine(device: str) -> str:
    name = torch.cuda.get_device_name() if device.startswith("cuda") else f"{platform.machine()} CPU, one thread"
    return f"{name}, Python {platform.python_version()}, torch {torch.__version__}"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=PRESETS, metavar="PRESET")
    parser.add_argument("--readers", nargs="+", choices=READERS, default=READERS, metavar="READER")
    parser.add_argument(
        "--victims", type=int, help="records that type2 attacks in each cell, instead of the command's own number"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="commands at a time")
    parser.add_argument("--commit", help="the commit that is measured, where this is a copy without its repository")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the stored cells as Markdown")
    given = parser.parse_args()
    if given.table:
        print(markdown(json.loads(given.out.read_text())["cells"]))
        return
    wanted = [cell for cell in cells(tuple(given.presets), given.victims) if cell.reader in given.readers]
    sys.exit(1 if run(wanted, given.device, given.workers, given.commit or clean_commit(), given.out) else 0)


if __name__ == "__main__":
    main()
