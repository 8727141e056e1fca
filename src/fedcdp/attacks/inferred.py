"""Inference without reconstruction: labels, presence and membership, for inputs of any kind.

Token ids cannot be reconstructed by a search over real numbers. The gradient still reveals labels, and whether a known
example is in it; the trained model reveals who was a member. `Inferred` holds the results of these three attacks.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedcdp.attacks.labels import infer_labels, last_layer
from fedcdp.attacks.leaks import finite
from fedcdp.attacks.membership import Membership
from fedcdp.attacks.observe import Captured
from fedcdp.attacks.presence import Presence
from fedcdp.attacks.reconstruct import Progress
from fedcdp.attacks.scores import chance_interval
from fedcdp.attacks.targets import has_classes, recovery
from fedcdp.attacks.text_tokens import TokenGuesses, infer_tokens
from fedcdp.data.dataset import Dataset
from fedcdp.errors import DataError, FedcdpError
from fedcdp.files.disk import write_atomically
from fedcdp.files.tree import Inputs, each_tensor
from fedcdp.mechanism.randomness import numpy_generator

_REFINED = 16  # largest batch whose labels are tried one by one
_VALUES = 2**26  # gradient values of one chunk of victims


@dataclass(frozen=True, eq=False)
class LabelGuesses:
    """How many labels of the victims' examples follow from the gradient of the last layer."""

    examples: int
    """The number of examples."""
    accuracy: float
    """Share of right labels; for a batch, whose labels have no order, of those that occur in it as often as inferred."""
    baseline: float | None
    """The same for the most frequent public label or, if that is better, for a batch in the proportions of public labels;
    None without public examples."""
    chance: tuple[float, float] | None
    """The accuracies that guessing at random reaches with 99 % confidence, for one label of single examples; else None."""
    guesses: Tensor = field(repr=False)
    """[victims, examples, ...]: the inferred labels."""

    def summary(self) -> dict[str, Any]:
        """All figures."""
        chance = None if self.chance is None else list(self.chance)
        row = {"label_accuracy": self.accuracy, "label_baseline": self.baseline, "label_chance_99": chance}
        return row | {
            "labels_inferred": self.guesses.numel() * self.examples // (self.guesses.shape[0] * self.guesses.shape[1])
        }


@dataclass(frozen=True, eq=False, repr=False)
class Inferred:
    """The results of attacks that infer labels, presence and membership, and reconstruct nothing.

    Examples:
        >>> import fedcdp, torch
        >>> from torch import nn
        >>> ids = torch.randint(50, (60, 8), generator=torch.Generator().manual_seed(0))
        >>> federation = fedcdp.partition(fedcdp.Dataset(ids, ids[:, 0] % 2, classes=2), clients=6, scheme="iid")
        >>> model = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(32, 2))
        >>> plan = fedcdp.Plan(method="nonprivate", per_round=6)
        >>> found = fedcdp.attack(plan, model=model, federation=federation, victims=10)
        >>> found.labels.accuracy, found.presence.auc.value
        (1.0, 1.0)
    """

    method: str
    """The training method."""
    leak: str
    """What the adversary observed: `type0`, `type1` or `type2`."""
    attack: str
    """The name of the attack: `labels`, `tokens`, or `inference` for labels, presence and membership."""
    victims: int
    """How many victims were attacked."""
    noise_deviation: float
    """Standard deviation of the noise on the observation."""
    steps: int
    """Local steps behind the observation."""
    releases: int
    """How many releases the adversary averaged."""
    labels: LabelGuesses | None = None
    """The inferred labels; None if they were not attacked."""
    tokens: TokenGuesses | None = None
    """The inferred token ids; None if they were not attacked."""
    presence: Presence | None = None
    """Whether, and which, examples were detected; None if this was not attacked."""
    membership: Membership | None = None
    """Whether members of the training data were detected; None if this was not attacked."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why an attack does not apply, by its name."""
    names: tuple[str, ...] | None = None
    """The name of each victim's client, if clients have names."""
    seconds: float = 0.0
    """How long the attacks took."""
    summed_clients: int = 0
    """How many clients' updates were added up before anyone read them; 0: each was read alone."""

    def __str__(self) -> str:
        told = []
        if self.labels is not None:
            baseline = "" if self.labels.baseline is None else f" (public labels alone: {100 * self.labels.baseline:.3g} %)"
            told.append(f"{100 * self.labels.accuracy:.3g} % labels right{baseline}")
        if self.tokens is not None:
            shares = f"{100 * self.tokens.recall:.3g} % of tokens found, {100 * self.tokens.precision:.3g} % of those right"
            told.append(f"{shares} (most frequent tokens: {100 * self.tokens.baseline[1]:.3g} %)")
        if self.presence is not None:
            told.append(f"presence AUC {self.presence.auc.value:.3f}")
            if self.presence.success_rate is not None:
                share = f"{100 * self.presence.success_rate:.3g} %"
                told.append(f"{share} identified among {self.presence.candidates:,}")
        if self.membership is not None:
            told.append(f"membership AUC {self.membership.auc.value:.3f}")
        return f"{self.leak}, attack {self.attack}, {self.victims} victims of {self.method}: {', '.join(told)}"

    __repr__ = __str__

    def summary(self) -> dict[str, Any]:
        """All figures, as `fedcdp attack --json` prints them; a figure that was not measured is None."""
        row: dict[str, Any] = {"method": self.method, "leak": self.leak, "attack": self.attack, "victims": self.victims}
        row |= dict.fromkeys(("success_rate", "distance_mean", "distance_median", "psnr_mean", "iterations_mean"))
        row |= {"noise_deviation": self.noise_deviation, "steps": self.steps, "releases": self.releases}
        if self.summed_clients:
            row["summed_clients"] = self.summed_clients
        tried: list[dict[str, Any]] = []
        if self.labels is not None:
            row |= self.labels.summary()
            tried.append({"attack": "labels", "success_rate": None, "label_accuracy": self.labels.accuracy})
        if self.tokens is not None:
            row |= self.tokens.summary()
            tried.append({"attack": "tokens", "success_rate": None, "token_recall": self.tokens.recall})
        if self.presence is not None:
            found = self.presence.summary()
            row |= {name: found[name] for name in ("auc", "auc_interval_99", "auc_predicted", "candidates")}
            row["identified_rate"] = self.presence.success_rate
            tried.append({"attack": "matched-filter", "success_rate": self.presence.success_rate, "auc": found["auc"]})
        if self.membership is not None:
            measured = self.membership.summary()
            row |= {f"membership_{name}": measured[name] for name in ("auc", "auc_interval_99", "advantage", "others")}
            tried.append({"attack": "membership", "success_rate": None, "auc": measured["auc"]})
        tried += [{"attack": name, "success_rate": None, "refused": why} for name, why in self.refused.items()]
        if self.names is not None:
            row["clients"] = [{"client": name, "victims": self.names.count(name)} for name in dict.fromkeys(self.names)]
        told: dict[str, Any] = finite(row | {"seconds": round(self.seconds, 2), "tried": tried})
        return told

    def save(self, directory: Path, **about: Any) -> None:
        """Write `summary.json`.

        Args:
            directory: The directory, which is made if it is missing.
            **about: More entries for the summary, such as the dataset and the network.
        """
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / "summary.json", (json.dumps(self.summary() | about, indent=1) + "\n").encode())


def attack_labels(
    captured: Captured, classes: int, public: Dataset | None, *, names: tuple[str, ...] | None, seed: int = 0,
    scored: bool = True, progress: Progress | None = None,
) -> Inferred:  # fmt: skip
    """Infer the labels behind every observation, and compare them with the truth."""
    if not scored:
        raise DataError("truth: the attack labels needs the true examples, to be scored")
    started = time.perf_counter()
    guesses = _inferred(captured, classes, public, seed, progress)
    truth, present = captured.targets, captured.present
    if has_classes(captured.task):
        accuracy, baseline = _in_common(guesses, truth, present), None
        if public is not None:
            usual = [_usual_batch(public.targets, classes, int(count), captured.most) for count in present.sum(1)]
            both = torch.stack(usual).to(truth), public.targets.mode().values.to(truth).expand_as(truth)
            baseline = max(_in_common(guess, truth, present) for guess in both)
        chance = chance_interval(int(present.sum()), 1 / classes) if captured.most == 1 else None
    else:
        found = recovery(captured.task, guesses, truth, present, public)
        accuracy, baseline, chance = found["label_accuracy"], found["label_baseline"], None
    labels = LabelGuesses(int(present.sum()), accuracy, baseline, chance, guesses)
    return Inferred(
        captured.plan.method, captured.leak, "labels", len(captured), captured.noise_level, captured.steps,
        captured.releases, labels=labels, names=names, seconds=time.perf_counter() - started,
        summed_clients=captured.summed_clients,
    )  # fmt: skip


def attack_tokens(
    captured: Captured, network: nn.Module, classes: int, public: Dataset | None, *, names: tuple[str, ...] | None,
    seed: int = 0, scored: bool = True, progress: Progress | None = None,
) -> Inferred:  # fmt: skip
    """Infer the token ids behind every observation and, where there are classes, the labels of the sequences."""
    if not scored:
        raise DataError("truth: the attack tokens needs the true examples, to be scored")
    started = time.perf_counter()
    tokens, refused, labels = infer_tokens(captured, network, public, seed), {}, None
    try:
        labels = attack_labels(captured, classes, public, names=names, seed=seed, progress=progress).labels
    except FedcdpError as error:
        refused["labels"] = str(error)
    return Inferred(
        captured.plan.method, captured.leak, "tokens", len(captured), captured.noise_level, captured.steps,
        captured.releases, labels=labels, tokens=tokens, refused=refused, names=names,
        seconds=time.perf_counter() - started, summed_clients=captured.summed_clients,
    )  # fmt: skip


def _in_common(guesses: Tensor, truth: Tensor, present: Tensor) -> float:
    """The share of labels that each victim's batch has in common with its guess, in any order."""
    length = 1 + int(torch.maximum(guesses.max(), truth.max()))
    common = 0
    for guess, real, filled in zip(guesses, truth, present, strict=True):
        counts = [torch.bincount(each[filled], minlength=length) for each in (guess, real)]
        common += int(torch.minimum(counts[0], counts[1]).sum())
    return common / int(present.sum())


def _usual_batch(labels: Tensor, classes: int, count: int, most: int) -> Tensor:
    """[most]: a batch of `count` labels in their usual proportions, then zeros."""
    wanted = torch.bincount(labels.cpu(), minlength=classes) * count / len(labels)
    batch = torch.zeros(most, dtype=torch.int64)
    for place in range(count):
        batch[place] = wanted.argmax()
        wanted[batch[place]] -= 1
    return batch


def _inferred(captured: Captured, classes: int, public: Dataset | None, seed: int, progress: Progress | None) -> Tensor:
    """[victims, examples, ...]."""
    if captured.task == "multilabel" and captured.most == 1 and captured.steps == 1:
        weight, bias = last_layer(captured.engine.layout, captured.targets.shape[2])
        evidence = captured.seen[weight].sum(2) if bias is None else captured.seen[bias]
        return (evidence < 0).float()[:, None]  # p − y is negative exactly where y is 1
    if not has_classes(captured.task):
        why = {
            "multilabel": "the labels of several examples overlap",
            "language": "its targets are token ids, which the attack tokens infers",
        }.get(captured.task, "its targets are values")
        raise DataError(f"attack: labels does not apply to task {captured.task} here: {why}")
    at_once = max(1, _VALUES // (captured.most * captured.engine.layout.size))
    found = []
    for who in torch.arange(len(captured), device=captured.device).split(at_once):
        part = captured.take(who)
        seeds = _seeds(part, public, seed, int(who[0]))
        rule, knows = ("gradient", "gradient") if captured.most == 1 and captured.steps == 1 else ("counts", "method")
        found.append(
            infer_labels(part, rule, classes, seeds, "gradient" if captured.most > _REFINED else knows)  # type: ignore[arg-type]
        )
        if progress is not None:
            progress(int(who[-1]) + 1, len(captured))
    return torch.cat(found)


def _seeds(part: Captured, public: Dataset | None, seed: int, first: int) -> Inputs:
    """Public examples in the place of the victims' own; a single example's label does not depend on them."""
    if part.most == 1 and part.steps == 1:
        return each_tensor(part.inputs, torch.zeros_like)
    if public is None:
        raise DataError("public: the labels of a batch are counted with the help of public examples, and there are none")
    drawn = numpy_generator(seed, "label-seeds", first).integers(len(public), size=tuple(part.present.shape))
    return each_tensor(public.inputs, lambda value: value[torch.from_numpy(drawn)].to(part.device))
