"""The page about a check: one page, with the verdict, the findings, ε for each adversary and the measurements."""

from __future__ import annotations

import math
from importlib.resources import files
from typing import Any

from fedcdp._version import __version__
from fedcdp.accounting.statement import VACUOUS, format_epsilon
from fedcdp.checks.findings import Check, TensorProbe
from fedcdp.errors import RunError

_BADGES = {"exceeds the claim": "leaks", "leaks": "leaks"}
_MOST_TENSORS = 40
_HEADLINES = {
    "exceeds the claim": "The claim does not hold.",
    "leaks": "Something leaves the client without protection.",
    "consistent with the claim": "Nothing here contradicts the claim. That is no proof of it.",
    "no claim to compare with": "No ε was claimed. These are the ε that hold, and the attacks that apply.",
}


def render_check(check: Check) -> str:
    """The whole page as one text. It loads nothing, runs no script, and shows no record."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise RunError("report: needs jinja2; install it with pip install jinja2") from error

    environment = Environment(
        loader=PackageLoader("fedcdp.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    style = (files("fedcdp.report") / "templates" / "page.css").read_text(encoding="utf-8")
    privacy = check.privacy
    scales = list(check.tensors[0].moved) if check.tensors else []
    return environment.get_template("check.html").render(
        check=check,
        badge=_BADGES.get(check.verdict, "failed"),
        headline=_HEADLINES[check.verdict],
        version=__version__,
        style=style,
        assumptions=[] if privacy is None else privacy.assumptions(),
        notes=[] if privacy is None else privacy.notes,
        leaks=any(finding.level == "leak" for finding in check.findings),
        tensors=[_tensor_cells(tensor, scales) for tensor in check.tensors[:_MOST_TENSORS]],
        more_tensors=max(0, len(check.tensors) - _MOST_TENSORS),
        scales=scales,
        multiplied={"inputs": "its inputs", "weights": "the network's weights"}[check.multiplied],
        attacks=[_attack_cells(each) for each in check.attacks],
        e=format_epsilon,
        is_vacuous=lambda epsilon: VACUOUS <= epsilon < math.inf,
    )


def _tensor_cells(tensor: TensorProbe, scales: list[float]) -> dict[str, Any]:
    entries = math.prod(tensor.shape)
    noise = f"{tensor.noise:.3g}" if tensor.noise else "none"
    moved = [f"{tensor.moved[scale]:.3g}" if tensor.moved[scale] else "hidden" for scale in scales]
    clipped = {True: "yes", False: "no", None: "not tested"}[tensor.bounded]
    faults = []
    if tensor.silent:
        faults.append(f"{tensor.silent} of {entries} entries without noise" if tensor.noise else "without noise")
    faults += ["not clipped"] if tensor.bounded is False else []
    return {"name": tensor.name, "shape": "×".join(map(str, tensor.shape)) or "1", "noise": noise, "moved": moved,
            "clipped": clipped, "fault": "; ".join(faults)}  # fmt: skip


def _attack_cells(summary: dict[str, Any]) -> tuple[str, str]:
    """An attack that was run, and its result in words."""
    if summary.get("auc") is not None:
        low, high = summary["auc_interval_99"]
        reach = f"{summary['auc']:.3f} (99 %: {low:.3f} to {high:.3f})"
        return summary["attack"], f"tells from one call whether a record of the batch was there, with an AUC of {reach}"
    rate = summary.get("success_rate")
    labels = summary.get("label_accuracy")
    told = [] if rate is None else [f"reconstructs {100 * rate:.3g} % of {summary['victims']} records exactly"]
    told += [] if labels is None else [f"infers {100 * labels:.3g} % of the labels"]
    return summary["attack"], "; ".join(told) or "not scored"
