"""The tasks of the rogue-server trial, and other written forms of them."""

from __future__ import annotations

import json
import random
from typing import Any

from fedcdp.config.plan import Plan
from fedcdp.deploy.protocol.task import Task

TENSORS = {"0.weight": (4, 3), "0.bias": (4,), "2.weight": (2, 4), "2.bias": (2,)}
_USUAL: dict[str, Any] = {"rounds": 8, "per_round": 4, "local_steps": 2, "batch_size": 5, "secure_noise": True,
                          "record_sampling": "partition", "noise_multiplier": 25.0}  # fmt: skip
_SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "much noise": {"noise_multiplier": 60.0},
    "noise for a whole client": {"noise_multiplier": 300.0},
    "several uses": {"local_steps": 30, "noise_multiplier": 60.0},
    "a bound that grows under noise that stays": {
        "clip": "linear(2, 6)",
        "noise_follows_clip": False,
        "noise_multiplier": 90.0,
    },
    "a bound that decays under noise that stays": {"method": "fed-cdp-decay", "noise_follows_clip": False},
    "quantile": {"clip": "quantile(0.5, 4)", "quantile_noise": 40.0},
    "sampled": {"record_sampling": "poisson", "noise_multiplier": 2.0},
    "private scaling": {"noise_multiplier": 60.0, "scaling_noise": 20.0},
    "private scaling of single records": {"noise_multiplier": 60.0, "scaling_noise": 600.0},
    "batch noise": {"noise": "batch", "noise_multiplier": 70.0},
    "cohort noise": {"noise": "cohort", "noise_multiplier": 300.0},
    "a sum": {
        "noise": "sum",
        "secure_aggregation": True,
        "local_steps": 1,
        "noise_multiplier": 60.0,
        "colluders": 1,
        "attempts": 3,
    },
    "Fed-SDP": {"method": "fed-sdp", "noise_at": "client", "noise_multiplier": 60.0},
    "raw at the server": {"method": "fed-sdp"},
    "raw": {"method": "nonprivate"},
    "no noise": {"noise_multiplier": 0.0},
    "a published seed": {"secure_noise": False},
}
PLANS = ["plain"] * 4 + ["much noise"] * 3 + list(_SETTINGS)


def task_of(case: random.Random, name: str) -> Task:
    """A task with its own run."""
    plan = Plan(**_USUAL | _SETTINGS[name])
    return Task(
        run=f"{case.getrandbits(128):032x}",
        shape=(3,),
        classes=2,
        network="ours",
        activation=None,
        tensors=TENSORS,
        constants="",
        plan=plan,
        smallest_cohort=case.choice([1, 2]),
        reproducible=not plan.secure_noise,
    )


def aliases_of(text: str) -> list[str]:
    """Other texts that mean the same task, or nearly; some are not valid JSON."""
    try:
        written = json.loads(text)
    except ValueError:
        return [text]
    plan = written["plan"]

    def but(**changes: Any) -> str:
        return json.dumps(written | changes)

    tensors = written["tensors"]
    return [
        but(tensors=tensors[::-1]),
        but(tensors=tensors[1:] + tensors[:1]),
        *(but(plan=plan | {name: -0.0}) for name in ("momentum", "ema", "compression")),
        *(but(plan=plan | {name: 0}) for name in ("momentum", "ema", "compression")),
        but(plan=plan | {"noise_multiplier": round(plan["noise_multiplier"]) if plan["noise_multiplier"] > 0 else 25}),
        but(plan=plan | {"secure_noise": int(plan["secure_noise"])}),
        but(plan=plan | {"clip": str(plan["clip"]).replace(" ", "")}),
        but(plan=plan | {"clip": str(plan["clip"]).replace("4", "4.0").replace("6", "6.0")}),
        but(plan=plan | {"clip": f" {plan['clip']} "}),
        but(plan=plan | {"learning_rate": 0.05}),
        but(plan=plan | {"slots": None}),
        but(plan={name: value for name, value in plan.items() if name != "momentum"}),
        but(plan=plan | {"noise_multiplier": float("nan")}),
        json.dumps(dict(reversed(written.items()))),
        json.dumps(written, separators=(",", ":")),
        json.dumps(written, indent=1),
        text.replace("0.0", "0.00"),
        text.replace("0.0", "-0.0"),
        text.replace("fed", "\\u0066ed"),
        text.replace("{", '{"run": "0", ', 1),
        text + " ",
        but(smallest_cohort=float(written["smallest_cohort"])),
        but(smallest_cohort=3),
        but(network="theirs"),
        but(activation="relu"),
        but(classes=True),
        but(run=written["run"].upper()),
    ]
