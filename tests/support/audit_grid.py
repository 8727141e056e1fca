"""The grid: audits over all methods, noise conventions and samplings, each beside the ε that is printed for it.

A sound case must stay at or below its ε; a sabotaged one must exceed it. A case that does not do what it must is a defect.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fedcdp.accounting.population import Population
from fedcdp.accounting.statement import state
from fedcdp.audit.lower_bound import Audit, audit
from fedcdp.config.plan import Plan
from fedcdp.methods import METHODS
from tests.support.sabotage import FAULTS, Fault, sabotaged, scaled

LAYERS = 3
_SLOW = 60  # times fewer trials, where every one needs a server of its own


@dataclass(frozen=True)
class Case:
    """A plan, who attacks it, and what is known of the population."""

    name: str
    plan: Plan
    adversary: str
    unit: str = "record"
    relation: str = "zero-out"
    records: int = 6
    participations: int = 1
    clients: int | None = None
    """A round draws out of so many; None: the canary's client is known to take part."""
    copies: int = 1
    others: int | None = None
    """Records at the clients that do not hold the canary; None: as many as at the one that does."""
    width: int = 3
    """Inputs of each layer."""
    fault: Fault | None = field(default=None, compare=False)
    drawn_from: int | None = None
    """A sabotaged sampler: a step really draws out of so many records."""

    @property
    def broken(self) -> bool:
        """Whether the mechanism was sabotaged."""
        return self.fault is not None or self.drawn_from is not None

    def printed(self) -> float:
        """The ε that `fedcdp account` states."""
        groups = LAYERS if self.plan.clip_mode == "layer" else 1
        sizes = sorted({self.records, self.others or self.records})
        population = Population(
            clients=self.clients or max(20, self.plan.per_round),
            records=sizes[0],
            copies=self.copies,
            layers=groups,
            sizes=tuple(sizes) if len(sizes) > 1 else (),
        )
        row = state(self.plan, population, rounds=self.participations).row(self.adversary, self.unit, self.relation)
        return row.epsilon_worst if self.clients is None else row.epsilon

    def attack(self, trials: int, seed: int = 0) -> Audit:
        """What an attack proves."""
        sound = METHODS[self.plan.method]
        return audit(
            self.plan,
            self.adversary,
            unit="record" if self.unit == "unique" else self.unit,
            layers=LAYERS,
            records=self.drawn_from or self.records,
            participations=self.participations,
            relation=self.relation,
            clients=self.clients,
            copies=self.copies,
            others=self.others,
            width=self.width,
            trials=max(1000, trials // _SLOW) if self.adversary == "model" else trials,
            seed=seed,
            method=sabotaged(sound, self.fault) if self.fault else sound,
        )


@dataclass(frozen=True)
class Verdict:
    """What came of a case."""

    case: Case
    printed: float
    found: Audit

    @property
    def as_it_must(self) -> bool:
        """A sound mechanism keeps within its ε, and a broken one does not."""
        return (self.found.epsilon_lower > self.printed) == self.case.broken

    def as_json(self) -> dict[str, Any]:
        """For a file of results."""
        case, found, plan = self.case, self.found, self.case.plan
        what = {"name": case.name, "adversary": case.adversary, "unit": case.unit, "relation": case.relation}
        how = {"records": case.records, "participations": case.participations, "clients": case.clients}
        how |= {"others": case.others, "width": case.width}
        asked = what | how | {"copies": case.copies, "broken": case.broken, "plan": plan.written()}
        shown = {"epsilon_lower": found.epsilon_lower, "epsilon_gaussian": found.epsilon_gaussian,
                 "epsilon_printed": self.printed, "trials": found.trials, "seconds": round(found.seconds, 1)}  # fmt: skip
        return asked | {key: "inf" if value == math.inf else value for key, value in shown.items()}


def run(cases: Iterable[Case], trials: int, seed: int = 0) -> Iterator[Verdict]:
    """Attack every case."""
    for case in cases:
        yield Verdict(case, case.printed(), case.attack(trials, seed))


def _plan(**changes: Any) -> Plan:
    usual: dict[str, Any] = {"local_steps": 1, "batch_size": 3, "per_round": 4, "record_sampling": "partition"}
    usual |= {"noise_multiplier": 3.0}
    return Plan(**usual | changes)


def sound_cases() -> list[Case]:
    """Every method, noise convention, sampling, adversary, unit and relation that has a finite ε."""
    poisson, fixed = {"record_sampling": "poisson"}, {"record_sampling": "fixed"}
    several = {"local_steps": 4}
    cdp = [
        Case("example noise, fixed order", _plan(), "example"),
        Case("example noise, fixed order, the record replaced", _plan(), "example", relation="replace-one"),
        Case("example noise, fixed order, five rounds", _plan(), "example", participations=5),
        Case("example noise, fixed order, four steps, wrapping around", _plan(**several), "example"),
        Case("example noise, Poisson records", _plan(**poisson, noise_multiplier=1.0), "example"),
        Case("example noise, Poisson records, replaced", _plan(**poisson), "example", relation="replace-one"),
        Case("example noise, fixed-size batches, four steps", _plan(**fixed, **several), "example"),
        Case("example noise, fixed order", _plan(noise_multiplier=1.5), "server"),
        Case("example noise, fixed order, a batch larger than the client", _plan(noise_multiplier=1.5), "server", records=2),
        Case("example noise, fixed order, L·B beyond N", _plan(noise_multiplier=2.0, **several), "server", records=5),
        Case("example noise, Poisson, three slots an example", _plan(**poisson, noise_multiplier=0.4), "server", records=12),
        Case("example noise, Poisson, slots = B", _plan(**poisson, noise_multiplier=1.0, slots=3), "server", records=12),
        Case("example noise, Poisson, eight steps", _plan(**poisson, noise_multiplier=1.0, local_steps=8), "server"),
        Case("example noise, fixed-size batches", _plan(**fixed, noise_multiplier=2.0), "server", records=12),
        Case("example noise, fixed-size batches, four steps", _plan(**fixed, **several, noise_multiplier=3.0), "update"),
        Case("batch noise, fixed order", _plan(noise="batch"), "server"),
        Case(
            "batch noise, fixed order, five rounds", _plan(noise="batch", noise_multiplier=6.0), "update", participations=5
        ),
        Case("batch noise, Poisson", _plan(**poisson, noise="batch", noise_multiplier=1.5), "server"),
        Case("batch noise, Poisson, few slots", _plan(**poisson, noise="batch", noise_multiplier=1.5, slots=3), "server"),
        Case("batch noise, fixed-size batches", _plan(**fixed, noise="batch", noise_multiplier=4.0), "server"),
        Case("cohort noise, fixed order", _plan(noise="cohort", noise_multiplier=8.0), "server"),
        Case("cohort noise, Poisson", _plan(**poisson, noise="cohort", noise_multiplier=6.0), "server"),
        Case("cohort noise, fixed-size batches", _plan(**fixed, noise="cohort", noise_multiplier=16.0), "server"),
        Case("flat clipping, momentum", _plan(clip_mode="flat", momentum=0.5, noise_multiplier=1.0), "server"),
        Case("pruned", _plan(compression=0.3, noise_multiplier=1.5), "server"),
        Case("whole models, server's rate 0.5", _plan(aggregation="fedaveraging", server_learning_rate=0.5), "model"),
        Case("a client, example noise", _plan(noise_multiplier=6.0), "server", unit="client"),
        Case(
            "a client, batch noise, Poisson", _plan(**poisson, noise="batch", noise_multiplier=12.0), "server", unit="client"
        ),
        Case("who takes part is drawn, and known", _plan(noise_multiplier=1.5), "server", clients=8, participations=3),
        Case("two copies", _plan(), "server", unit="unique", copies=2),
        Case("one step, secure aggregation", _plan(secure_aggregation=True, noise_multiplier=0.8), "model", clients=8),
    ]
    decay = {"method": "fed-cdp-decay", "clip": "linear(6, 2)", "rounds": 5}
    kept = decay | {"noise_follows_clip": False}
    decaying = [
        Case("bound and noise decay", _plan(**decay), "example", participations=5),
        Case("bound and noise decay, batch noise, Poisson", _plan(**decay, **poisson, noise="batch", noise_multiplier=3.0),
             "server", participations=5),
        Case("the bound decays, the noise stays", _plan(**kept, noise_multiplier=1.5), "server", participations=5),
        Case("the bound grows, the noise stays", _plan(**kept | {"method": "fed-cdp", "clip": "linear(2, 6)"}), "server",
             participations=5),
    ]  # fmt: skip
    client, server = {"method": "fed-sdp", "noise_at": "client"}, {"method": "fed-sdp", "noise_at": "server"}
    sdp = [
        Case("noise at the client", _plan(**client), "server", unit="client"),
        Case("noise at the client, three rounds", _plan(**client), "update", unit="client", participations=3),
        Case("noise at the client, a record", _plan(**client), "server"),
        Case("noise at the client, a record, Poisson, four steps", _plan(**client, **poisson, **several), "server"),
        Case("noise at the client, a person at two clients", _plan(**client), "server", unit="unique", copies=2),
        Case("noise at the server", _plan(**server, noise_multiplier=2.0), "model", unit="client"),
        Case("noise at the server, a record", _plan(**server), "model"),
        Case("noise at the server, Poisson clients", _plan(**server, client_sampling="poisson", noise_multiplier=1.2),
             "model", unit="client", clients=8),
        Case("noise at the server, Poisson clients, a record",
             _plan(**server, client_sampling="poisson", noise_multiplier=3.0), "model", clients=8),
        Case("noise at the server, fixed-size cohorts", _plan(**server, noise_multiplier=3.0), "model", unit="client",
             clients=8),
        Case("noise at the server, a person at two clients", _plan(**server), "model", unit="unique", copies=2),
    ]  # fmt: skip
    return cdp + decaying + sdp + secure_corners() + unequal_clients()


def unequal_clients() -> list[Case]:
    """Clients that weigh by their records, and noise on the slots that a small client can fill."""
    weighted, held = {"weighting": "records", "mean_records": 21.0}, {"noise_slots": "held"}
    together = _plan(**weighted, secure_aggregation=True, batch_size=12, noise_multiplier=0.4)
    return [
        Case("weighted by records, a small client", _plan(**weighted, noise_multiplier=1.5), "server", records=2),
        Case("weighted by records, a large client", _plan(**weighted, noise_multiplier=1.5), "server", records=40),
        Case("weighted by records, Fed-SDP at the client",
             _plan(**weighted, method="fed-sdp", noise_at="client"), "server", unit="client", records=40),
        Case("weighted by records, Fed-SDP at the server",
             _plan(**weighted, method="fed-sdp", noise_multiplier=2.0), "model", unit="client", records=40, others=2),
        Case("weighted by records, secure aggregation, all records of a small client", together, "model", records=1,
             others=12, clients=4),
        Case("weighted by records, secure aggregation, all records of a large client", together, "model", records=12,
             others=1, clients=4),
        Case("weighted by records, secure aggregation, cohorts", together, "model", records=1, others=12, clients=8),
        Case("noise on the slots that a small client fills", _plan(**held, batch_size=8, noise_multiplier=1.5), "example",
             records=2),
        Case("noise on the slots that a small client fills", _plan(**held, batch_size=8, noise_multiplier=1.5), "server",
             records=2),
        Case("noise on the slots that a small client fills, Poisson",
             _plan(**held, record_sampling="poisson", batch_size=4, noise_multiplier=1.0), "example", records=6),
    ]  # fmt: skip


def secure_corners() -> list[Case]:
    """Where other clients' noise was credited, or sampling amplified, more than it is worth."""
    secure = {"secure_aggregation": True}
    pruned = {"compression": 0.9999, "clip_mode": "flat", "noise_multiplier": 0.2, "batch_size": 1, "per_round": 20}
    first_of_many = _plan(**secure, batch_size=1, noise_multiplier=0.6)
    small = _plan(**secure, batch_size=16, noise_multiplier=0.25, per_round=64)
    return [
        Case("secure aggregation, the first of 10,000 records in every round", first_of_many, "model", records=10_000,
             clients=8),
        Case("secure aggregation, the first of 10,000 records, every client in every round", first_of_many, "model",
             records=10_000, clients=4),
        Case("secure aggregation, each client prunes its noise", _plan(**secure, **pruned, delta=0.01), "model", records=1,
             clients=20, width=199),
        Case("secure aggregation, a client with fewer records than a batch", small, "model", records=1, others=40,
             clients=128),
        Case("secure aggregation, every client in every round, one with fewer records than a batch", small, "model",
             records=1, others=40, clients=64),
    ]  # fmt: skip


def sabotaged_cases() -> list[Case]:
    """What must be caught."""
    caught = []
    targets: list[tuple[str, Plan, str, str]] = [
        ("Fed-CDP, example noise", _plan(noise_multiplier=2.0), "example", "record"),
        ("Fed-CDP, batch noise", _plan(noise="batch", noise_multiplier=2.0), "server", "record"),
        (
            "Fed-SDP, noise at the client",
            _plan(method="fed-sdp", noise_at="client", noise_multiplier=2.0),
            "server",
            "client",
        ),
    ]
    for name, fault in FAULTS.items():
        caught += [Case(f"{name}: {which}", plan, who, unit, fault=fault) for which, plan, who, unit in targets]
    halved_twice = _plan(method="fed-sdp", noise_multiplier=2.0)
    poisson = _plan(record_sampling="poisson", noise="batch", noise_multiplier=1.5)
    held = _plan(noise_slots="held", batch_size=8, noise_multiplier=1.5)
    weighted = _plan(weighting="records", mean_records=20.0, noise="batch", noise_multiplier=2.0)
    return [
        *caught,
        Case("a small client's slots carry no more noise than others'", held, "example", records=2, fault=scaled(0.5)),
        Case("noise weighted a second time, at a small client", weighted, "server", records=2,
             fault=lambda at: scaled(float(at.client_weights.min()))(at)),
        Case("noise divided by K_t once more: Fed-SDP, noise at the server", halved_twice, "model", "client",
             fault=scaled(0.25)),
        Case("amplification claimed of a record that every step draws", poisson, "server", records=60, drawn_from=3),
    ]  # fmt: skip
