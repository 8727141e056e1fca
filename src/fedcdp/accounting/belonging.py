"""Whether a ledger is that of the run directory in which it lies: a statement by another's would be false.

| in the directory | must agree with the ledger |
| --- | --- |
| the plan in `config.toml` | every setting but the seed, which a ledger does not hold; also whether the noise is secret |
| the number of clients in `config.toml`, or the clients in `clients.json` | the population |
| the checkpoint, the model | their plan is that of `config.toml`; each of their rounds is charged |

A ledger that has more rounds than the checkpoint counts too much at worst, and is accepted. A file that is missing is not
compared: config and ledger are enough on another machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcdp.accounting.ledger import Ledger
from fedcdp.errors import FedcdpError, RunError
from fedcdp.files import read_about
from fedcdp.plan import Plan
from fedcdp.rundir import RunDirectory
from fedcdp.untrusted import MOST_JSON, MOST_SETTINGS, parse_json, parse_toml, read_bounded


def check_ledger(run: RunDirectory, ledger: Ledger) -> None:
    """Refuse a ledger that is of another run, or that lacks rounds (`RunError`)."""
    config = _read(run.config, MOST_SETTINGS, parse_toml)
    try:
        ours, theirs = (Plan(**plan | {"seed": 0}) for plan in (config["plan"], ledger.plan))
        digest = Plan(**config["plan"]).digest()
    except (KeyError, TypeError, FedcdpError) as error:
        raise RunError(f"{run.config} or {run.ledger} holds a plan that this program does not know: {error}") from error
    for name, value in ours.written().items():
        if (other := theirs.written()[name]) != value:
            raise RunError(f"{run.ledger} belongs to another run: its plan has {name} = {other}, and {run.config} {value}")
    if ledger.noise != ("secure" if ours.secure_noise else "seeded"):
        raise RunError(f"{run.ledger} belongs to another run: its noise is {ledger.noise}, and {run.config} says otherwise")
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
    counted, roster = ledger.population["clients"], run.path / "clients.json"
    if roster.exists():
        members = _read(roster, MOST_JSON, parse_json)
        try:
            clients, fewest = len(members["clients"]), min(each["records"] for each in members["clients"])
        except (KeyError, TypeError, ValueError):
            raise RunError(f"{roster} is damaged") from None
        if (clients, True) != (counted, ledger.population.get("records", 1) <= fewest):
            raise RunError(f"{run.ledger} belongs to another run: it is not of the {clients} clients in {roster.name}")
    elif isinstance(data := config.get("data"), dict) and (dealt := data.get("clients")) != counted:
        raise RunError(f"{run.ledger} belongs to another run: it is of {counted} clients, and {run.config} of {dealt}")


def _read(path: Path, most: int, parse: Any) -> Any:
    try:
        return parse(read_bounded(path, most))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}") from None
