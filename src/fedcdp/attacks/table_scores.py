"""Cell scores: how many cells of a table were recovered, and what guesses from public rows alone recover.

| cell | right if |
| --- | --- |
| a category | it is the true one; "missing" is a category |
| a number | it lies within 0.319 public standard deviations of the truth (the tolerance of Vero et al., ICML 2023) |

A row is right if all its cells are. The rows of a batch are matched to the truth such that the most cells are right, and so
are the guesses: `mode`, the most frequent value of each column (for a number, the one with most public values within the
tolerance); `marginals`, each cell drawn from the public values of its column; `public_rows`, random public rows.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcdp.attacks.table_rows import decode
from fedcdp.data.input_columns import InputColumns
from fedcdp.mechanism.randomness import numpy_generator

TOLERANCE = 0.319
"""How far a number may be off, in standard deviations of public values."""
_DRAWS = 5  # of random guesses, averaged
_EXACT = 1e-6  # the least tolerance: that of a number that is the same in all public rows


@dataclass(frozen=True, eq=False)
class CellScores:
    """Which cells of the victims' rows were recovered."""

    columns: InputColumns
    right: Tensor
    """[victims, examples, columns], in the order of the truth; False in absent slots."""
    order: Tensor
    """[victims, examples]: which reconstruction belongs to each true row."""
    present: Tensor
    """[victims, examples]."""
    baselines: dict[str, tuple[float, float]]
    """For each guess, the share of right cells and of right rows."""
    truth: Tensor
    found: Tensor
    """[victims, examples, columns]: the cells, those found in the order of the truth."""

    @property
    def cells_right(self) -> float:
        """Share of cells that are right."""
        return float(self.right[self.present].double().mean())

    @property
    def rows_right(self) -> float:
        """Share of rows all of whose cells are right."""
        return float(self.right[self.present].all(-1).double().mean())

    def summary(self) -> dict[str, Any]:
        """All figures."""
        shares = self.right[self.present].double().mean(0).tolist()
        return {
            "cells_right": self.cells_right,
            "rows_right": self.rows_right,
            "cell_baselines": {
                name: {"cells_right": cells, "rows_right": rows} for name, (cells, rows) in self.baselines.items()
            },
            "columns_right": {column.name: share for column, share in zip(self.columns, shares, strict=True)},
        }

    def as_csv(self) -> str:
        """Every row twice, as it is and as it was found, with numbers as the network reads them."""
        written = io.StringIO()
        table = csv.writer(written)
        table.writerow(["victim", "row", "which", *(column.name for column in self.columns), "cells right"])
        for victim, slot in self.present.nonzero().tolist():
            for which, cells in (("true", self.truth), ("found", self.found)):
                texts = [
                    f"{cell:.6g}" if column.is_number else column.say(int(cell))
                    for column, cell in zip(self.columns, cells[victim, slot].tolist(), strict=True)
                ]
                hits = int(self.right[victim, slot].sum()) if which == "found" else ""
                table.writerow([victim, slot, which, *texts, hits])
        return written.getvalue()


def score_cells(
    rows: Tensor, truth: Tensor, present: Tensor, columns: InputColumns, public: Tensor, seed: int = 0
) -> CellScores:
    """Score reconstructed rows [victims, examples, n] against the true ones, and guesses from public rows [N, n]."""
    known = decode(public, columns).double().cpu()
    allowed = torch.tensor([TOLERANCE if column.is_number else 0.0 for column in columns], dtype=torch.float64)
    numbers = allowed > 0
    allowed = torch.where(numbers, (allowed * known.std(0, correction=0)).clamp(min=_EXACT), 0.5)
    real = decode(truth, columns).double().cpu()
    found = decode(rows.nan_to_num(0.0, 0.0, 0.0), columns).double().cpu()
    filled = present.cpu()
    right, order = _matched(found, real, filled, allowed)
    guesses: dict[str, list[Tensor]] = {"mode": [_mode(known, allowed).expand_as(real)], "marginals": [], "public_rows": []}
    for draws in (numpy_generator(seed, "table-guesses", number) for number in range(_DRAWS)):
        each = torch.from_numpy(draws.integers(len(known), size=tuple(real.shape)))
        guesses["marginals"].append(known.gather(0, each.flatten(0, 1)).view_as(real))
        guesses["public_rows"].append(known[torch.from_numpy(draws.integers(len(known), size=tuple(real.shape[:2])))])
    baselines = {}
    for name, several in guesses.items():
        hits = [_matched(guess, real, filled, allowed)[0][filled] for guess in several]
        baselines[name] = (
            float(np.mean([float(each.double().mean()) for each in hits])),
            float(np.mean([float(each.all(-1).double().mean()) for each in hits])),
        )
    arranged = found.gather(1, order[..., None].expand_as(found))
    return CellScores(columns, right, order, filled, baselines, real, arranged)


def _mode(known: Tensor, allowed: Tensor) -> Tensor:
    """[columns]: the public value of each column that has the most public values within its tolerance."""
    best = []
    for values, near in zip(known.T, allowed, strict=True):
        ordered = values.sort().values
        inside = torch.searchsorted(ordered, ordered + near, right=True) - torch.searchsorted(ordered, ordered - near)
        best.append(ordered[inside.argmax()])
    return torch.stack(best)


def _matched(found: Tensor, truth: Tensor, present: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Which cells are right [victims, examples, columns] under the best matching, and the matching [victims, examples]."""
    right = torch.zeros(truth.shape, dtype=torch.bool)
    order = torch.arange(truth.shape[1]).repeat(len(truth), 1)
    for victim, slots, best in _assignments(found, truth, present, allowed):
        order[victim, slots] = best
        right[victim, slots] = (found[victim, best] - truth[victim, slots]).abs() <= allowed
    return right, order


def _assignments(found: Tensor, truth: Tensor, present: Tensor, allowed: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each victim its filled slots, and the reconstructions assigned to them."""
    from scipy.optimize import linear_sum_assignment

    for victim in range(len(truth)):
        slots = present[victim].nonzero()[:, 0]
        gain = torch.zeros(len(slots), len(slots), dtype=torch.float64)
        for number, near in enumerate(allowed):  # one column at a time: a batch may have a thousand rows
            off = (truth[victim, slots, number, None] - found[victim, slots, number]).abs()
            gain += (off <= near) + 1e-3 / (1 + off / near)  # among equals, the closest
        yield victim, slots, slots[torch.from_numpy(linear_sum_assignment(-gain.numpy())[1])]
