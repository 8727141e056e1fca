"""Method × attack × trust model: every attack of fedcdp against every method, on the same footing.

    python -m benchmarks.attack_matrix --device cuda --workers 16     # results/attack_matrix.json
    python -m benchmarks.attack_matrix --only type-1 --victims 20     # fewer victims; the stored command says how many
    python -m benchmarks.attack_matrix --table > results/attack_matrix.md

A cell is one command, which is stored with its figures, commit, machine and seconds; `--list` prints all. Commands run in a
pool of processes, by the code of the command line, longest first. Stored cells are not run again. An attack that refuses a
method or a plan is a cell too, with the reason. LiRA's cells are those of benchmarks/lira.py, which trains shadow
federations. Many processes share a GPU well only under CUDA's multi-process service (`nvidia-cuda-mps-control -d`).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import shlex
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks import text_attack
from benchmarks.clean_tree import clean_commit
from benchmarks.matrix_cells import COLUMNS, LIRA_CELLS, LIRA_COLUMN, METHODS, TRUST, Cell, cells
from fedcdp.errors import FedcdpError

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "attack_matrix.json"
LIRA = ROOT / "results" / "lira.json"
_REFUSED = 2  # exit status


# Measuring -----------------------------------------------------------------------------------------------------------


def measure(command: str, device: str) -> dict[str, Any]:
    """Run a command in this process; its figures, or why it refuses."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    program, *words = shlex.split(command)
    shown = run_text(words[2:], device) if program == "python" else run_program(words, device)
    return shown | {"wall_seconds": round(time.perf_counter() - started, 1)}


def run_program(words: list[str], device: str) -> dict[str, Any]:
    """`fedcdp WORDS --device DEVICE --json`."""
    from fedcdp.cli.program import main

    printed, complaints, given = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["fedcdp", *words, "--device", device, "--json", "--quiet"]
    try:
        with redirect_stdout(printed), redirect_stderr(complaints):
            main()
    except SystemExit as ended:
        if ended.code == _REFUSED:
            return {"refused": complaints.getvalue().strip().splitlines()[-1].removeprefix("fedcdp: ")}
        if ended.code:
            raise RuntimeError(complaints.getvalue().strip().splitlines()[-1]) from ended
    finally:
        sys.argv = given
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def run_text(words: list[str], device: str) -> dict[str, Any]:
    """`python -m benchmarks.text_attack WORDS --device DEVICE`."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            text_attack.main([*words, "--device", device])
    except FedcdpError as error:
        return {"refused": str(error)}
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def short(row: dict[str, Any]) -> dict[str, Any]:
    """The figures of a summary that the result file keeps."""
    return {name: value for name, value in row.items() if name not in ("clients", "plan")}


def run(given: argparse.Namespace) -> int:
    """Measure all cells that are not stored, several at a time; the number that failed."""
    stored: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {"runs": [], "cells": {}}
    origin = {"commit": given.commit or clean_commit(), "machine": _machine(given.device)}
    todo = [cell for cell in cells() if _wanted(cell, given.only) and cell.name not in stored["cells"]]
    todo.sort(key=lambda cell: -cell.weight)
    about = origin | {"workers": given.workers, "cells": 0, "seconds": 0.0}
    stored["runs"].append(about)
    started, failed = time.perf_counter(), 0
    with ProcessPoolExecutor(given.workers, get_context("spawn")) as pool:
        waiting: dict[Future[dict[str, Any]], Cell] = {}
        while todo or waiting:
            while todo and len(waiting) < given.workers and time.perf_counter() - started < 60 * given.minutes:
                cell = todo.pop(0)
                waiting[pool.submit(measure, _limited(cell.command, given.victims), given.device)] = cell
            if not waiting:
                break
            for done in wait(waiting, return_when=FIRST_COMPLETED).done:
                cell = waiting.pop(done)
                about["seconds"] = round(time.perf_counter() - started, 1)
                try:
                    row = short(done.result())
                except Exception as error:
                    failed += 1
                    print(f"{cell.name}: {type(error).__name__}: {error}", flush=True)
                    continue
                command = f"{_limited(cell.command, given.victims)} --device {given.device} --json"
                stored["cells"][cell.name] = {"command": command} | origin | row
                about["cells"] += 1
                print(
                    f"{about['seconds']:5.0f} s  {cell.name}  {shown(cell.column, row)}  ({row['wall_seconds']} s)",
                    flush=True,
                )
                given.out.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if todo:
        print(f"{len(todo)} cells are not run: {', '.join(cell.name for cell in todo)}")
    return failed


def _wanted(cell: Cell, only: list[str]) -> bool:
    return cell.name.startswith(tuple(only))


def _limited(command: str, victims: int | None) -> str:
    """The command with at most this many victims."""
    words = command.split()
    if victims is not None and "--victims" in words:
        at = words.index("--victims") + 1
        words[at] = str(min(int(words[at]), victims))
    return " ".join(words)


def _machine(device: str) -> str:
    name = torch.cuda.get_device_name() if device.startswith("cuda") else f"{platform.machine()} CPU, one thread"
    return f"{name}, Python {platform.python_version()}, torch {torch.__version__}"


# Showing -------------------------------------------------------------------------------------------------------------


def with_lira(found: dict[str, Any]) -> dict[str, Any]:
    """All cells, and those of benchmarks/lira.py."""
    told = dict(found)
    measured = json.loads(LIRA.read_text(encoding="utf-8"))["cells"] if LIRA.exists() else {}
    for (method, trust), name in LIRA_CELLS.items():
        if name in measured:
            told[f"lira/{trust}/{method}"] = measured[name]
    return told


def shown(column: str, row: dict[str, Any] | None) -> str:
    """One cell of the matrix: percent for a share or two, two digits for an AUC, a dash where nothing was measured."""
    about = (COLUMNS | {"lira": LIRA_COLUMN})[column]
    figure = about.figure
    if row is None:
        return "–"
    if row.get("refused"):
        return "refused"
    value = row.get(figure)
    if value is None:
        return "–"
    if figure == "auc":
        return f"{value:.2f}".lstrip("0")
    shares = [value] if row.get(about.also) is None else [value, row[about.also]]
    return " / ".join(f"{100 * share:.3g}" for share in shares) + " %"


def matrix(stored: dict[str, Any], columns: tuple[str, ...]) -> str:
    """The matrix of some columns as Markdown, with a footnote for every refusal."""
    found = with_lira(stored.get("cells", {}))
    notes: dict[str, int] = {}
    lines = [_row(["the server reads", "method", *columns]), _row(["---"] * (2 + len(columns)))]
    for trust in TRUST:
        for method in METHODS:
            words = []
            for column in columns:
                cell = Cell(column, trust, method)
                row = found.get(cell.name)
                text = cell.repeats or shown(column, row)
                if text == "refused" and row is not None:
                    text = f"refused ({notes.setdefault(row['refused'], len(notes) + 1)})"
                words.append(text)
            lines.append(_row([trust, method, *words]))
    return "\n".join([*lines, *([""] if notes else []), *(f"{number}. {reason}" for reason, number in notes.items())])


def crafted(stored: dict[str, Any]) -> str:
    """The AUC of presence by the formula, in one round at honest weights and at those that active servers craft."""
    methods = [(method, trust) for method in METHODS if method.startswith("Fed-CDP") for trust in TRUST]
    lines = [_row(["weights", *(f"{method}, {trust}" for method, trust in methods)]), _row(["---"] * (1 + len(methods)))]
    for column in ("presence", "imprint", "trap-weights", "fishing", "frozen-weights"):
        found = [stored["cells"].get(Cell(column, trust, method).name, {}).get("auc_predicted") for method, trust in methods]
        shares = ["–" if auc is None else f"{auc:.3f}".lstrip("0") for auc in found]
        lines.append(_row(["honest" if column == "presence" else f"`{column}`", *shares]))
    return "\n".join(lines)


def markdown(stored: dict[str, Any]) -> str:
    """The matrix, and the details of every cell."""
    found = with_lira(stored["cells"])
    parts = [
        "# Method × attack × trust model",
        "`make matrix` measures the cells and writes this page; attack_matrix.json has the command, commit and machine of "
        "each. [docs/attacks.md](../docs/attacks.md#the-matrix) explains the columns.",
        *(f"{each['cells']} cells in {each['seconds'] / 60:.1f} minutes: {each['machine']}, {each['workers']} processes."
          for each in stored["runs"] if each["cells"]),
        matrix(stored, (*COLUMNS, "lira")),
        "## Every cell",
        "*Exact*: MSE < 1e-3. *Recognisable*: PSNR of 15 dB or more and closer than the class mean. *Knowing nothing*: the "
        "label accuracy or token recall of a guess from public data; for pixels, the MSE of the public mean image.",
    ]  # fmt: skip
    headings = [
        "cell",
        "victims",
        "exact",
        "recognisable",
        "identified",
        "MSE median",
        "labels",
        "AUC",
        "knowing nothing",
        "seconds",
    ]
    lines = [_row(headings), _row(["---"] * len(headings))]
    lines += [_row([name, *_details(row)]) for name, row in found.items()]
    return "\n\n".join([*parts, "\n".join(lines)])


def _details(row: dict[str, Any]) -> list[str]:
    if row.get("refused"):
        return ["–", f"refused: {row['refused']}", *["–"] * 7]
    shares = [_percent(row.get(name)) for name in ("success_rate", "recognisable_rate", "identified_rate")]
    mse = "–" if row.get("distance_median") is None else f"{row['distance_median']:.2g}"
    auc = "–" if row.get("auc") is None else f"{row['auc']:.3f}"
    labels, baseline = row.get("label_accuracy"), row.get("label_baseline")
    nothing = "–" if baseline is None else f"labels {_percent(baseline)}"
    if row.get("token_recall") is not None:
        labels, nothing = row["token_recall"], f"tokens {_percent(row['token_baseline']['recall'])}"
    elif row.get("knowing_nothing"):
        nothing = f"MSE {row['knowing_nothing']['dataset_mean']['mse']:.2g}"
    seconds = row.get("wall_seconds", row.get("seconds"))
    return [
        str(row.get("victims", "–")),
        *shares,
        mse,
        _percent(labels),
        auc,
        nothing,
        "–" if seconds is None else f"{seconds:.0f}",
    ]


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.3g} %"


def _row(words: list[str]) -> str:
    return "| " + " | ".join(words) + " |"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no cell starts after this many minutes")
    parser.add_argument("--only", nargs="+", default=[""], metavar="PREFIX", help="only cells whose names start so")
    parser.add_argument("--victims", type=int, help="at most this many in each cell, where a CPU is slow")
    parser.add_argument("--commit", help="the commit that is measured, where this is a copy without its repository")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--list", action="store_true", help="print the cells and their commands")
    parser.add_argument("--table", action="store_true", help="print the stored cells as Markdown")
    given = parser.parse_args()
    if given.list:
        print("\n".join(f"{cell.name}: {cell.command}" for cell in cells() if _wanted(cell, given.only)))
    elif given.table:
        print(markdown(json.loads(given.out.read_text(encoding="utf-8"))))
    elif run(given):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
