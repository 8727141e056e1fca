"""Targets: the files of a run directory, and the cache."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from fedcdp.accounting.journal import _line
from fedcdp.accounting.ledger import Ledger
from fedcdp.config.experiment import assemble, read_toml
from fedcdp.errors import FedcdpError
from fedcdp.files.tensors import load_tensors
from fedcdp.models.networks import build
from fedcdp.report.api import read_run
from fedcdp.report.page import render
from fedcdp.training.autotune import _read as read_choice
from fedcdp.training.ledger_check import spent
from fedcdp.training.prepared import deal_out, load_splits, stored
from fedcdp.training.rundir import RunDirectory
from fedcdp.training.saved_run import open_run
from fedcdp.training.trainer import train_experiment
from tools.fuzz.mutations import as_json, as_toml, mutate_bytes, mutate_value

Attempt = Callable[[Random, Path], None]
SMALL: dict[str, Any] = {
    "data": {"dataset": "cancer", "clients": 8},
    "plan": {"per_round": 4, "rounds": 3, "local_steps": 2},
}


def finished_run(place: Path) -> Path:
    """A finished small run, created once per place."""
    run = place / "sound"
    if not run.exists():
        train_experiment(assemble(SMALL), run, quiet=True)
    return run


def rechained(lines: list[Any]) -> bytes:
    """Lines of a journal, each with correct digests, whatever their content."""
    written, previous = [], ""
    for content in lines:
        inner = {key: value for key, value in content.items() if key not in ("previous", "digest")} if isinstance(
            content, dict
        ) else {"value": content}  # fmt: skip
        try:
            line = _line(inner, previous)
        except (ValueError, RecursionError, UnicodeError):  # not JSON that we would write, but with a digest
            body = as_json({**inner, "previous": previous})[:-1]
            line = body + f',"digest":"{hashlib.blake2b(body, digest_size=16).hexdigest()}"}}'.encode()
        written.append(line)
        previous = line[-34:-2].decode(errors="replace")
    return b"\n".join(written) + b"\n"


def ledger(place: Path) -> Attempt:
    """The run's ledger: with bytes changed, or with lines changed and chained anew; then the ε computed from it."""
    content = (finished_run(place) / "ledger.jsonl").read_bytes()
    lines = [json.loads(line) for line in content.splitlines()]
    run = place / "ledger-run"
    run.mkdir(exist_ok=True)
    shutil.copy(finished_run(place) / "config.toml", run)

    def attempt(case: Random, _place: Path) -> None:
        hostile = mutate_bytes(case, content) if case.random() < 0.4 else rechained(_changed_lines(case, lines))
        (run / "ledger.jsonl").write_bytes(hostile)
        opened = Ledger.open(run / "ledger.jsonl")
        if opened.population["clients"] < 10**6:
            opened.participations()
        opened.busiest(opened.population.get("copies", 1) if isinstance(opened.population.get("copies"), int) else 1)
        if case.random() < 0.05:
            spent(run, "rdp")

    return attempt


def _changed_lines(case: Random, lines: list[Any]) -> list[Any]:
    changed = json.loads(json.dumps(lines))
    at = 0 if case.random() < 0.5 else case.randrange(len(changed))
    changed[at] = mutate_value(case, changed[at])
    if case.random() < 0.2:
        changed.insert(case.randrange(len(changed) + 1), case.choice(changed))
    return changed


def restamped(case: Random, content: bytes) -> bytes:
    """A tensor file with a changed header or metadata, and a matching digest if one can be computed."""
    length = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    if case.random() < 0.5:
        about = mutate_value(case, json.loads(header["__metadata__"]["fedcdp"]))
        if isinstance(about, dict) and case.random() < 0.8:
            about = _with_digest(about, header, data)
        header["__metadata__"]["fedcdp"] = as_json(about).decode("utf-8", "replace")
    else:
        header = mutate_value(case, header)
    written = as_json(header)
    size = len(written) if case.random() < 0.9 else case.choice((0, 2**20, 2**40, 2**63, 2**64 - 1))
    return struct.pack("<Q", size) + written + data


def _with_digest(about: dict[str, Any], header: dict[str, Any], data: bytes) -> dict[str, Any]:
    about.pop("sha256", None)
    try:
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    except (RecursionError, TypeError):
        return about
    for name in sorted(key for key in header if key != "__metadata__"):
        start, end = header[name]["data_offsets"]
        digest.update(f"{name} torch.float32 {tuple(header[name]['shape'])}\n".encode())
        digest.update(data[start:end])
    return about | {"sha256": digest.hexdigest()}


def checkpoint(place: Path) -> Attempt:
    """The latest state."""
    return _tensors(place, "checkpoint.safetensors", lambda run: RunDirectory(run).load_state())


def model(place: Path) -> Attempt:
    """The trained model."""
    return _tensors(place, "model.safetensors", lambda run: load_tensors(run / "model.safetensors", "model-1"))


def _tensors(place: Path, name: str, read: Callable[[Path], object]) -> Attempt:
    content = (finished_run(place) / name).read_bytes()
    run = place / f"{name}-run"
    run.mkdir(exist_ok=True)

    def attempt(case: Random, _place: Path) -> None:
        hostile = mutate_bytes(case, content) if case.random() < 0.4 else restamped(case, content)
        (run / name).write_bytes(hostile)
        read(run)

    return attempt


def metrics(place: Path) -> Attempt:
    """The metrics of the rounds, as they are read, resumed and exported."""
    sound = finished_run(place)
    rows = [json.loads(line) for line in (sound / "metrics.jsonl").read_bytes().splitlines()]
    run = place / "metrics-run"
    run.mkdir(exist_ok=True)
    shutil.copy(sound / "config.toml", run)
    opened = replace(open_run(sound), directory=run)

    def attempt(case: Random, _place: Path) -> None:
        content = b"".join(as_json(row) + b"\n" for row in rows)
        changed = mutate_value(case, rows)
        if case.random() < 0.6 and isinstance(changed, list):
            content = b"".join(as_json(row) + b"\n" for row in changed)
        else:
            content = mutate_bytes(case, content)
        (run / "metrics.jsonl").write_bytes(content)
        directory = RunDirectory(run)
        tampered = replace(opened, metrics=directory.read_metrics())
        for old in ("m.csv",):
            (run / old).unlink(missing_ok=True)
        tampered.export(run / "m.csv")
        if case.random() < 0.005:  # slow, because it writes events
            shutil.rmtree(run / "board", ignore_errors=True)
            tampered.export(run / "board")
        directory.forget_metrics_after(3)

    return attempt


def scores(place: Path) -> Attempt:
    """The metrics of the final model and of its clients, as they are read and shown."""
    sound = finished_run(place)
    stored_scores = json.loads((sound / "scores.json").read_bytes())
    stored_scores["clients"] = [{"client": "site a", "examples": 3} | stored_scores["metrics"]]
    facts = read_run(sound)
    run = place / "scores-run"
    run.mkdir(exist_ok=True)

    def attempt(case: Random, _place: Path) -> None:
        changed = mutate_value(case, stored_scores)
        hostile = mutate_bytes(case, as_json(stored_scores)) if case.random() < 0.4 else as_json(changed)
        (run / "scores.json").write_bytes(hostile)
        found, clients = RunDirectory(run).read_scores(facts.rounds)
        if case.random() < 0.05:  # slow
            render([replace(facts, scores=found, client_scores=clients)], [])

    return attempt


def configuration(place: Path) -> Attempt:
    """A configuration file, given or in a run directory, up to the population that it describes."""
    sound = finished_run(place)
    text = (sound / "config.toml").read_bytes()
    settings = read_toml(sound / "config.toml")
    run = place / "config-run"
    run.mkdir(exist_ok=True)
    splits = load_splits(assemble(settings), quiet=True)

    def attempt(case: Random, _place: Path) -> None:
        changed = mutate_value(case, settings)
        hostile = mutate_bytes(case, text) if case.random() < 0.4 else as_toml(changed)
        (run / "config.toml").write_bytes(hostile)
        experiment = stored(run)
        experiment.plan.digest()
        experiment.to_toml()
        if experiment.data.file is not None:
            load_splits(experiment, quiet=True)
        build(experiment.model.network, splits.train.shape, splits.train.classes, experiment.model.activation)
        deal_out(experiment, splits)

    return attempt


def engine_cache(place: Path) -> Attempt:
    """Cached engine measurements: never an error, only measured again."""
    sound = {"engine": "batched", "chunk": 16, "seconds": 0.001, "measured_for": {"network": "x"}}
    path = place / "choice.json"

    def attempt(case: Random, _place: Path) -> None:
        changed = mutate_value(case, sound)
        path.write_bytes(mutate_bytes(case, as_json(sound)) if case.random() < 0.4 else as_json(changed))
        try:
            choice = read_choice(path)
        except FedcdpError as error:
            raise AssertionError("a bad cache entry must be ignored, not reported") from error
        if choice is not None and not (type(choice.chunk) is int and choice.chunk > 0 and not math.isnan(choice.seconds)):
            raise AssertionError(f"{choice} was believed")

    return attempt


TARGETS: dict[str, Callable[[Path], Attempt]] = {
    "config.toml": configuration,
    "ledger.jsonl": ledger,
    "checkpoint.safetensors": checkpoint,
    "model.safetensors": model,
    "metrics.jsonl": metrics,
    "scores.json": scores,
    "engine cache": engine_cache,
}
