"""Leaks: the scored result of a reconstruction attack, also as files and pictures."""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcdp.attacks.observe import Captured
from fedcdp.attacks.reconstruct import Reconstruction
from fedcdp.attacks.scores import Baselines, Scores, chance_interval, cleaned, rearrange
from fedcdp.attacks.table_scores import CellScores
from fedcdp.attacks.targets import recovery
from fedcdp.data.dataset import Dataset
from fedcdp.files.disk import write_atomically

SHOWN_VICTIMS = 8
FITS = 1e-3  # share of what was seen: an adversary who explains all but this believes that it has succeeded


@dataclass(frozen=True, eq=False, repr=False)
class Leaks:
    """The result of a reconstruction attack.

    The adversary never sees the truth: `scores` are those of the reconstruction that fitted best by the adversary's own
    measure.

    Examples:
        >>> import fedcdp
        >>> from pathlib import Path
        >>> from torch import nn
        >>> federation = fedcdp.partition(fedcdp.load("cancer"), clients=10, scheme="iid")
        >>> plan = fedcdp.Plan(method="nonprivate", per_round=10)
        >>> leaks = fedcdp.attack(plan, model=nn.Linear(30, 2), federation=federation, at_round=0, victims=5)
        >>> leaks.success_rate, leaks.label_accuracy()
        (1.0, 1.0)
        >>> leaks.save(Path("leak"))
        >>> sorted(path.name for path in Path("leak").iterdir())
        ['reconstructions.npz', 'rows.csv', 'summary.json']
    """

    attack: str
    """The name of the attack."""
    captured: Captured
    """What the adversary observed, and the truth."""
    found: Reconstruction
    """The reconstructions: `found.examples` [victims, examples, ...] and `found.labels`, the targets."""
    scores: Scores | None
    """How close the reconstructions are; None where the truth is not known."""
    scores_of_last: Scores | None
    """The same for the point where the search ended, which is what the paper reports."""
    baselines: Baselines | None
    """What guesses score that use nothing the adversary observed."""
    classes: int
    """The number of classes; 0 if the task has none."""
    value_range: tuple[float, float]
    """The range that the adversary assumes for the values of an input."""
    first_exact: Tensor
    """[victims]: the iteration after which a victim's examples were all exact for the first time; ∞ if never."""
    snapshots: dict[int, Tensor] = field(repr=False)
    """Examples of the first victims after some iterations [those, dummies, ...]."""
    seconds: float = 0.0
    """How long the attack took."""
    tried: tuple[dict[str, Any], ...] = ()
    """The result of each attack, where several were tried; this is the best of them."""
    about: dict[str, Any] = field(default_factory=dict)
    """More figures that only this attack has."""
    public: Dataset | None = field(default=None, repr=False)
    """The public examples, whose targets are the baseline for inferred targets."""
    names: tuple[str, ...] | None = None
    """The name of each victim's client, if clients have names."""
    cells: CellScores | None = None
    """Which cells were recovered, if the examples are rows of a table whose columns are known."""

    @property
    def success_rate(self) -> float | None:
        """Share of the victims' examples that were reconstructed exactly; None where the truth is not known."""
        return None if self.scores is None else self.scores.summary()["exact"]

    def label_accuracy(self) -> float | None:
        """Share of labels inferred correctly, each example matched to its reconstruction; None without the truth, and for
        targets that are not labels."""
        share: float | None = self.targets().get("label_accuracy")
        return share

    def targets(self) -> dict[str, Any]:
        """How well targets were inferred, next to a guess from public targets alone.

        Returns:
            For labels `label_accuracy` and `label_baseline`, the accuracy of the most frequent public label. For values
            `target_rmse` and `target_rmse_of_mean`, the error of the public mean. Empty without the truth.
        """
        if self.scores is None:
            return {}
        found, present = rearrange(self.found.labels, self.scores.order), self.scores.present
        return recovery(self.captured.task, found, self._true_labels(), present, self.public)

    def __str__(self) -> str:
        told = self.summary()
        head = f"{told['leak']}, attack {told['attack']}, {told['victims']} victims of {told['method']}"
        if self.scores is None:
            return f"{head}: the true examples are not known"
        shares = {"reconstructed exactly": told["success_rate"], "recognisable": told["recognisable_rate"]}
        shares |= {
            f"identified among {told['candidates']:,}": told["identified_rate"],
            "labels right": told["label_accuracy"],
        }
        figures = [f"{100 * share:.3g} % {what}" for what, share in shares.items() if share is not None]
        if told.get("target_rmse") is not None:
            mean = told["target_rmse_of_mean"]
            figures.append(f"targets wrong by {told['target_rmse']:.3g}" + ("" if mean is None else f" (mean: {mean:.3g})"))
        return f"{head}: " + ", ".join(figures)

    __repr__ = __str__

    def summary(self) -> dict[str, Any]:
        """All figures, as `fedcdp attack --json` prints them.

        Returns:
            A dictionary. A distance is the mean squared error of the clamped example, over the inputs that the network can
            see.
        """
        captured = self.captured
        row: dict[str, Any] = {
            "method": captured.plan.method,
            "leak": captured.leak,
            "attack": self.attack,
            "victims": len(captured),
            "success_rate": None,
            "distance_mean": None,
            "distance_median": None,
            "psnr_mean": None,
            "iterations_mean": float(self.found.iterations.double().mean()),
        }
        if self.found.misfit is not None and not bool(self.found.misfit.isnan().all()):
            row["fitted_rate"] = float((self.found.misfit < FITS).double().mean())
        if captured.summed_clients:
            row["summed_clients"] = captured.summed_clients
        if self.scores is not None and self.scores_of_last is not None and self.baselines is not None:
            scores, last = self.scores.summary(), self.scores_of_last.summary()
            reached = torch.where(self.first_exact.isfinite(), self.first_exact, self.found.iterations.double())
            chance = list(chance_interval(int(scores["examples"]), 1 / self.classes)) if self.classes else None
            of_classes = () if self.classes else ("class_mean", "drawn_means")
            nothing = {
                name: each for name, each in vars(self.baselines).items() if each is not None and name not in of_classes
            }
            row |= {
                "success_rate": scores["exact"],
                "distance_mean": scores["mse"],
                "distance_median": scores["median_mse"],
                "psnr_mean": scores["psnr"],
                "iterations_mean": float(reached.mean()),
                "iterations_median": float(reached.quantile(0.5)),
                "recognisable_rate": scores["recognisable"] if captured.tensor.dim() == 5 else None,
                "identified_rate": scores["identified"],
                "candidates": scores["candidates"],
                "rmse_mean": scores["rmse"],
                "rmse_mean_at_end": last["rmse"],
                "distance_mean_at_end": last["mse"],
                "ssim_mean": scores["ssim"],
                "label_accuracy": None,
                "label_chance_99": chance,
                **self.targets(),
                "examples": scores["examples"],
                "visible_coordinates": scores["coordinates"],
                "coordinates": captured.tensor[0, 0].numel(),
                "knowing_nothing": {name: _short(each) for name, each in nothing.items()},
            }
            if self.cells is not None:
                row |= self.cells.summary()
            if self.names is not None:
                row["clients"] = self._by_client(self.scores, self.names)
        outcome = torch.bincount(self.found.outcome.cpu(), minlength=3).tolist()
        row |= {
            "out_of_iterations": outcome[0],
            "converged": outcome[Reconstruction.CONVERGED],
            "diverged": outcome[Reconstruction.DIVERGED],
            "round": captured.round,
            "steps": captured.steps,
            "releases": captured.releases,
            "noise_deviation": captured.noise_level,
            "evaluations": self.found.evaluations,
            "seconds": round(self.seconds, 2),
        }
        row |= self.about | {"tried": list(self.tried)}
        return {name: finite(value) for name, value in row.items()}

    def _by_client(self, scores: Scores, names: tuple[str, ...]) -> list[dict[str, Any]]:
        """For each named client, how many of its examples were attacked, and the share that is exact."""
        rows = []
        for name in dict.fromkeys(names):
            mine = torch.tensor([each == name for each in names], device=scores.present.device)
            count, exact = int(scores.present[mine].sum()), int(scores.exact[mine].sum())
            rows.append({"client": name, "examples": count, "success_rate": exact / count if count else None})
        return rows

    def picture(self) -> Any:
        """A grid of each victim's first example: the original, the seed, the search on its way, and the reconstruction.

        Returns:
            A Pillow image; None unless the examples are images.
        """
        from fedcdp.attacks.pictures import grid

        truth = self._truth()
        if truth.dim() != 5 or truth.shape[2] not in (1, 3):
            return None
        shown = min(SHOWN_VICTIMS, len(truth))
        found, order = self.found, self._order()
        low, high = self.value_range

        def column(examples: Tensor) -> list[Tensor]:
            each = rearrange(examples[:shown].to(truth.device), order[:shown])
            return [(image - low) / (high - low) for image in each[:, 0]]

        columns = [("seed", column(found.seeds))]
        if self.scores is not None:
            columns.insert(0, ("original", [(image[0] - low) / (high - low) for image in truth[:shown]]))
        columns += [(f"iteration {number}", column(each)) for number, each in sorted(self.snapshots.items())]
        columns += [("reconstruction", column(found.examples))]
        rows = [list(row) for row in zip(*(images for _, images in columns), strict=True)]
        figures = [] if self.scores is None else [f"MSE {float(mse):.2g}" for mse in self.scores.mse[:shown, 0]]
        return grid(rows, [title for title, _ in columns], figures)

    def save(self, directory: Path, **about: Any) -> None:
        """Write `reconstructions.npz`, for images `grid.png`, for tables `rows.csv` (the cells of each row, true and found),
        and last, as the sign that all is written, `summary.json`.

        The files contain the originals where they are known.

        Args:
            directory: The directory, which is made if it is missing.
            **about: More entries for the summary, such as the dataset and the network.
        """
        directory.mkdir(parents=True, exist_ok=True)
        written = io.BytesIO()
        plain: dict[str, Any] = self.arrays()
        np.savez_compressed(written, **plain)
        write_atomically(directory / "reconstructions.npz", written.getvalue())
        if (picture := self.picture()) is not None:
            image = io.BytesIO()
            picture.save(image, format="PNG", optimize=True)
            write_atomically(directory / "grid.png", image.getvalue())
        if self.cells is not None:
            write_atomically(directory / "rows.csv", self.cells.as_csv().encode())
        write_atomically(directory / "summary.json", (json.dumps(self.summary() | about, indent=1) + "\n").encode())

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The reconstructions as `reconstructions.npz` holds them.

        The arrays are [victims, examples, ...]. `order` says which reconstruction belongs to each original. `snapshot` has
        one axis more in front: the first victims' examples after the iterations `snapshot_at`. `client` [victims] has the
        number of each victim's client, if clients have names. Arrays that need the truth are left out without it.
        """
        arrays = {
            "seed": self.found.seeds,
            "reconstruction": self.found.examples,
            "reconstruction_at_end": self.found.last,
            "label": self.found.labels,
            "iterations": self.found.iterations,
            "value_range": torch.tensor(self.value_range, dtype=torch.float64),
            "snapshot_at": torch.tensor(sorted(self.snapshots), dtype=torch.int64),
        }
        if self.names is not None:
            arrays["client"] = self.captured.client
        if self.snapshots:
            arrays["snapshot"] = torch.stack([self.snapshots[at] for at in sorted(self.snapshots)])
        if self.scores is not None:
            arrays |= {"original": self.captured.tensor, "original_label": self.captured.targets}
            arrays |= {name: getattr(self.scores, name) for name in ("mse", "order", "exact", "recognisable")}
        return {name: value.cpu().numpy() for name, value in arrays.items()}

    def _order(self) -> Tensor:
        return torch.zeros(len(self.captured), 1, dtype=torch.int64) if self.scores is None else self.scores.order

    def _truth(self) -> Tensor:
        return compared_truth(self.captured, self.found.examples, self.value_range)[0]

    def _true_labels(self) -> Tensor:
        return compared_truth(self.captured, self.found.examples, self.value_range)[1]


def compared_truth(captured: Captured, guesses: Tensor, value_range: tuple[float, float]) -> tuple[Tensor, Tensor, Tensor]:
    """The examples, labels and filled slots to compare guesses with: as many of the victim's examples as there are
    guesses, the nearest ones."""
    count = guesses.shape[1]
    if count == captured.most:
        return captured.tensor, captured.targets, captured.present
    # [victims, guesses, examples]
    distances = torch.cdist(cleaned(guesses, *value_range).flatten(2), captured.tensor.flatten(2))
    distances = distances.masked_fill(~captured.present[:, None], torch.inf)
    nearest = distances.amin(1).argsort(dim=1)[:, :count]
    return rearrange(captured.tensor, nearest), rearrange(captured.targets, nearest), rearrange(captured.present, nearest)


def _short(scores: Scores) -> dict[str, float]:
    row = scores.summary()
    return {name: row[name] for name in ("mse", "median_mse", "rmse", "psnr", "exact", "recognisable", "identified")}


def finite(value: Any) -> Any:
    """The same value with None for numbers that JSON does not support: NaN and the infinities."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
