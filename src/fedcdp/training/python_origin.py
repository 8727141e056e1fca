"""Runs whose network and data came from Python: what `config.toml` says about them, and whether given ones can be the same.

```
[python]
federation = "10 clients × 42 records, …"
clients = 10
task = "classification"
inputs = {"" = [30]}          # shapes by name; a single tensor has no name
targets = []
loss = "task"                 # or "own": a function, which no file holds
fixed = "9c56…"               # digest of the tensors that are not trained
[plan]
…
```

Only public facts are stored. A digest of records would be a release that no ε covers, so nobody can check that the records
are the same, nor who holds which and in which order. The sizes and names of clients are compared with the ledger's
population, and the trained tensors with the checkpoint. Code between the tensors, such as an activation, is not compared.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from fedcdp.accounting.ledger import Ledger
from fedcdp.accounting.population import Population
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation
from fedcdp.errors import FedcdpError, RunError
from fedcdp.files.untrusted import printable
from fedcdp.training.export import settings_in
from fedcdp.training.rundir import RunDirectory


def written_origin(network: nn.Module, federation: Federation, plan: Plan, own_loss: bool) -> str:
    """The `config.toml` of a run from Python. The network is the untrained one."""
    import tomli_w

    facts = {"federation": federation.describe(), **_facts(federation)}
    facts |= {"loss": "own" if own_loss else "task", "fixed": fixed_digest(network)}
    text = tomli_w.dumps({"python": facts, "plan": plan.written()})
    return f"# network and data came from Python\n{text}"


def read_origin(directory: RunDirectory) -> tuple[dict[str, Any], Plan] | None:
    """What is stored about a run from Python, and its plan; None for a run of the command line.

    The first release stored a sentence and nothing else: the dictionary is empty.
    """
    directory.require()
    written = settings_in(directory)
    if "python" not in written:
        return None
    try:
        plan = Plan(**written["plan"])
    except (KeyError, TypeError, FedcdpError) as error:
        raise RunError(f"{directory.config} holds a plan that this program does not know: {error}") from error
    return written["python"] if isinstance(written["python"], dict) else {}, plan


def check_origin(
    directory: RunDirectory,
    stored: dict[str, Any],
    *,
    network: nn.Module,
    federation: Federation,
    plan: Plan,
    population: Population,
) -> None:
    """Raise `RunError` if a network or federation cannot be that of the run."""
    check_federation(directory, stored, federation)
    if stored.get("fixed", digest := fixed_digest(network)) != digest:
        raise RunError(f"model: it is not that of the run in {directory.path}: it has other fixed tensors")
    if directory.ledger.exists():
        ledger = Ledger.open(directory.ledger)
        written = {key: value for key, value in plan.written().items() if key != "seed"}
        ledger.check(written, population.written(), "secure" if plan.secure_noise else "seeded")


def check_federation(directory: RunDirectory, stored: dict[str, Any], federation: Federation) -> None:
    """Raise `RunError` if a federation cannot be that of the run."""
    for name, value in _facts(federation).items():
        if name in stored and stored[name] != value:
            known, given = (printable(_shown(name, each)) for each in (stored[name], value))
            raise RunError(f"federation: it is not that of the run in {directory.path}: it has {name} {given}, not {known}")


def require_task_loss(directory: RunDirectory) -> None:
    """Raise `RunError` for a run from Python that had a loss of its own, which no command can name."""
    if (origin := read_origin(directory)) is not None and origin[0].get("loss") == "own":
        raise RunError(
            f"{directory.path} is a run from Python with a loss of its own; continue or attack it from Python "
            "(fedcdp.open_run)"
        )


def _facts(federation: Federation) -> dict[str, Any]:
    train = federation.train
    return {
        "clients": federation.clients,
        "task": train.task,
        "inputs": _shapes(train),
        "targets": list(train.targets.shape[1:]),
    }


def _shapes(data: Dataset) -> dict[str, list[int]]:
    inputs = data.inputs if isinstance(data.inputs, dict) else {"": data.inputs}
    return {name: list(value.shape[1:]) for name, value in inputs.items()}


def _shown(name: str, value: Any) -> str:
    shown = value[""] if name == "inputs" and isinstance(value, dict) and set(value) == {""} else value
    return f"of shape {shown}"[:100] if name in ("inputs", "targets") else str(shown)[:100]


def fixed_digest(network: nn.Module) -> str:
    """A digest of the tensors of a network that training does not change: frozen parameters and buffers."""
    fixed = {name: p.detach() for name, p in network.named_parameters() if not p.requires_grad}
    digest = hashlib.sha256()
    for name, value in sorted((fixed | dict(network.named_buffers())).items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]
