"""The ledger of a run directory: whether it belongs to the run, and the ε that it has charged.

`spent` computes ε from the ledger alone, also on a machine other than the one that trained. With another run's ledger the
statement would be false, so `check_ledger` compares first:

| in the directory | must agree with the ledger |
| --- | --- |
| the plan in `config.toml` | every setting but the seed, which a ledger does not hold; also whether the noise is secret |
| the number of clients in `config.toml`, or the clients in `clients.json` | the population |
| the checkpoint, the model | their plan is that of `config.toml`; each of their rounds is charged |

A ledger with more rounds than the checkpoint at worst counts too much, and is accepted. A missing file is not compared:
config and ledger are enough on another machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcdp.accounting.ledger import Ledger
from fedcdp.accounting.population import Population
from fedcdp.config.plan import Plan
from fedcdp.errors import FedcdpError, RunError
from fedcdp.files.tensors import read_about
from fedcdp.files.untrusted import MOST_JSON, MOST_SETTINGS, parse_json, parse_toml, read_bounded
from fedcdp.training.rundir import RunDirectory

if TYPE_CHECKING:
    from fedcdp.accounting.statement import Mode, Privacy, Usage


def check_ledger(run: RunDirectory, ledger: Ledger) -> None:
    """Raise `RunError` if a ledger belongs to another run or lacks rounds."""
    config = _read(run.config, MOST_SETTINGS, parse_toml)
    try:
        ours, theirs = (Plan(**plan | {"seed": 0}) for plan in (config["plan"], ledger.plan))
        digest = Plan(**config["plan"]).digest()
    except (KeyError, TypeError, FedcdpError) as error:
        raise RunError(f"{run.config} or {run.ledger} holds a plan that this program does not know: {error}") from error
    for name, value in vars(ours).items():
        if (other := getattr(theirs, name)) != value:
            raise RunError(f"{run.ledger} belongs to another run: its plan has {name} = {other}, but {run.config} {value}")
    if ledger.noise != ("secure" if ours.secure_noise else "seeded"):
        raise RunError(f"{run.ledger} belongs to another run: its noise is {ledger.noise}, but {run.config} says otherwise")
    _check_clients(run, ledger, config)
    charged = ledger.charges[-1].round + 1 if ledger.charges else 0
    for path, form in ((run.checkpoint, "checkpoint-1"), (run.model, "model-1")):
        if not path.exists():
            continue
        about = read_about(path, form)
        if about.get("plan", digest) != digest:
            raise RunError(f"{path} belongs to another plan than {run.config}")
        if type(about.get("round")) is not int or about["round"] > charged:
            done = about.get("round")
            raise RunError(f"{run.ledger} has {charged} rounds and {path.name} {done}: it lacks some, or is another run's")


def _check_clients(run: RunDirectory, ledger: Ledger, config: Mapping[str, Any]) -> None:
    counted, roster = ledger.members, run.path / "clients.json"
    if roster.exists():
        members = _read(roster, MOST_JSON, parse_json)
        try:
            clients, fewest = len(members["clients"]), min(each["records"] for each in members["clients"])
        except (KeyError, TypeError, ValueError):
            raise RunError(f"{roster} is damaged") from None
        if (clients, True) != (counted, ledger.population.get("records", 1) <= fewest):
            raise RunError(f"{run.ledger} belongs to another run: it is not for the {clients} clients in {roster.name}")
    elif isinstance(data := config.get("data", config.get("python")), dict) and (dealt := data.get("clients")) != counted:
        raise RunError(f"{run.ledger} belongs to another run: it is for {counted} clients, but {run.config} has {dealt}")


def _read(path: Path, most: int, parse: Any) -> Any:
    try:
        return parse(read_bounded(path, most))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}") from None


def spent(directory: Path | str, mode: Mode = "tight") -> tuple[Plan, Privacy]:
    """The plan of a run, and its privacy statement for the rounds released so far. Refuses the ledger of another run."""
    from fedcdp.accounting.statement import state

    run = RunDirectory(directory)
    run.require()
    ledger = Ledger.open(run.ledger)
    check_ledger(run, ledger)
    try:
        plan, population = Plan(**ledger.plan), Population.read(ledger.population)
    except (TypeError, FedcdpError) as error:
        raise RunError(f"{run.ledger} holds a plan or population that this program does not know: {error}") from error
    return plan, state(plan, population, mode=mode, rounds=ledger.rounds, usage=usage_of(ledger, population))


def usage_of(ledger: Ledger, population: Population) -> Usage:
    """Participation counts of the most-used clients: one, or as many clients as may hold copies of a record."""
    from fedcdp.accounting.statement import Usage

    counts = ledger.busiest(population.copies)
    by_client = tuple(ledger.participations().tolist()) if population.held else ()
    return Usage(ledger.rounds, tuple(int(count) for count in counts), by_client)
