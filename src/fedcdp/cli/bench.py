"""The command `bench`: speed on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcdp.cli import terminal
from fedcdp.config.experiment import MachineSettings, read_assignment
from fedcdp.engine.runtime import one_thread, usable_device
from fedcdp.errors import PlanError, RunError, StoppedError
from fedcdp.files.installation import install_command

if TYPE_CHECKING:
    from fedcdp.studies.bench.measurement import Report
    from fedcdp.studies.bench.result_file import BenchResults
    from fedcdp.studies.bench.sections import Bench


_SECTIONS = ("steps", "engines", "sampling", "growth", "peers")
_QUICK = ("steps",)


def bench(
    section: Annotated[
        list[str] | None,
        typer.Option(
            "--section", help=f"What to measure: {', '.join(_SECTIONS)}. Repeatable. Default: all; with --quick: steps."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Take about half a minute: one dataset, fewer repeats.")] = False,
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Also measure installed peers, if no --section is given.")
    ] = True,
    peer_python: Annotated[
        list[str] | None,
        typer.Option(
            "--peer-python", metavar="PEER=PYTHON", help="Python interpreter that has a peer installed. Repeatable."
        ),
    ] = None,
    repeat: Annotated[int | None, typer.Option("--repeat", help="How often each case is timed. Default: 3.")] = None,
    per_round: Annotated[
        int | None, typer.Option("--per-round", help="Clients per round, K_t. Default: 100; on a GPU, 500.")
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            "--device", help="cpu (one thread), cuda, or one of several GPUs, such as cuda:1.", rich_help_panel="Machine"
        ),
    ] = "cpu",
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", help="One setting of the section run, as key=value. Repeatable.", rich_help_panel="Machine"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="JSON file for the results. An existing file is completed.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a picture of the results (png, pdf or svg).")] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option("--data-dir", envvar="FEDCDP_DATA", help="Directory of dataset files. Default: random inputs."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no progress and no table.")] = False,
) -> None:
    """Measure the speed of client steps on this machine.

    It measures the time of a client step, how it grows, and the time that installed peers take. Whole rounds of the
    simulator are timed, with one thread on a CPU. Cases that are compared take turns.
    """
    from fedcdp.studies.bench import result_file, sections
    from fedcdp.studies.bench.result_file import BenchResults

    if repeat is not None and repeat < 1:
        raise PlanError(f"--repeat: {repeat} is not allowed; it must be at least 1")
    if per_round is not None and per_round < 1:
        raise PlanError(f"--per-round: {per_round} is not allowed; it must be at least 1")
    chosen = _chosen(section, quick, peers)
    settings = _machine_settings(device, assignments or [])
    how = sections.Bench(
        settings,
        data_dir,
        repeat or (2 if quick else 3),
        quick,
        seconds=0.4 if quick else 1.0,
        clients_a_round=per_round,
    )
    if plot is not None:
        _require_plotting(plot)
    with one_thread():
        results = BenchResults(result_file.describe(usable_device(settings.device)), out)
        try:
            with _progress(quiet) as report:
                _measure(how, chosen, results, _interpreters(peer_python or []), report)
        except KeyboardInterrupt:
            kept = f"; the measurements so far are in {out}" if out else ""
            raise StoppedError(f"stopped{kept}") from None
    if plot is not None:
        from fedcdp.studies.bench.tables import plot_speed

        plot_speed(results.as_json(), plot)
    if as_json:
        typer.echo(json.dumps(results.as_json()))
    elif not quiet:
        _show(results)


def _measure(how: Bench, chosen: list[str], results: BenchResults, interpreters: dict[str, str], report: Report) -> None:
    from fedcdp.studies.bench import sections
    from fedcdp.studies.bench.peers import peers

    for name in chosen:
        results.begin(name)
        rows = peers(how, report, interpreters) if name == "peers" else sections.SECTIONS[name](how, report)
        for group in rows:
            results.add(name, group)


def _chosen(section: list[str] | None, quick: bool, peers: bool) -> list[str]:
    for name in section or []:
        if name not in _SECTIONS:
            raise PlanError(f"--section: {name!r} is not one of {', '.join(_SECTIONS)}")
    from fedcdp.studies.bench.peers import drivers

    if section:
        if "peers" in section:
            drivers()
        return [name for name in _SECTIONS if name in section]
    chosen = [name for name in (_QUICK if quick else _SECTIONS) if peers or name != "peers"]
    try:
        if "peers" in chosen:
            drivers()
    except RunError as missing:
        terminal.note(f"peers are left out: {missing}")
        chosen.remove("peers")
    return chosen


def _machine_settings(device: str, assignments: list[str]) -> MachineSettings:
    given: dict[str, Any] = {"device": device}
    for written in assignments:
        ((section, setting),) = read_assignment(written).items()
        if section != "run":
            raise PlanError(f"--set {written}: bench fixes what is trained; only settings of [run] can be changed")
        given |= setting
    return MachineSettings(**given)


def _interpreters(written: list[str]) -> dict[str, str]:
    from fedcdp.studies.bench.peers import PEERS

    found = {}
    for each in written:
        name, equals, python = each.partition("=")
        if not equals or name not in PEERS:
            raise PlanError(f"--peer-python {each}: write it as PEER=PYTHON, with one of {', '.join(PEERS)}")
        if not Path(python).is_file():
            raise PlanError(f"--peer-python {each}: there is no file {python}")
        found[name] = python
    return found


def _require_plotting(target: Path) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlanError(f"--plot: this needs matplotlib; install it with {install_command('report')}") from None
    if target.suffix not in (".png", ".pdf", ".svg"):
        raise RunError(f"--plot: {target} must end with .png, .pdf or .svg")


@contextmanager
def _progress(quiet: bool) -> Iterator[Report]:
    """What is being measured: a line that changes; without a terminal, a line for each case."""
    if quiet:
        yield lambda _: None
    elif terminal.console.is_terminal:
        with terminal.console.status("…") as status:
            yield lambda what: status.update(f"measuring {what}")
    else:
        yield lambda what: terminal.console.print(f"measuring {what}")


def _show(results: BenchResults) -> None:
    from fedcdp.studies.bench.tables import machine_in_words, remarks, tables

    content = results.as_json()
    terminal.stdout.print(machine_in_words(results.machine), highlight=False)
    for title, headings, rows in tables(content):
        terminal.figures_table(title, headings, rows)
    for remark in remarks(content):
        terminal.stdout.print(remark, highlight=False, markup=False)
