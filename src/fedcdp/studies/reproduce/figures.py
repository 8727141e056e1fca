"""The pictures of a table, drawn from its result file and, for reconstructions, from the arrays next to it."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedcdp.files.disk import write_atomically
from fedcdp.studies.reproduce.catalogue import Place, Table
from fedcdp.studies.reproduce.layouts import Cells

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image


_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 300)


def draw(table: Table, cells: Cells, place: Place) -> list[str]:
    """Draw all available pictures of a table and return their names. Curves need matplotlib: without it, an ImportError."""
    maker = _PICTURES.get(table.name)
    if maker is None or not cells:
        return []
    picture = maker(table, cells, place)
    name = f"{table.name}.png"
    if picture is None:
        return [name] if (place.out / name).exists() else []
    written = io.BytesIO()
    picture.save(written, format="PNG", optimize=True)
    write_atomically(place.out / name, written.getvalue())
    return [name]


class Images:
    """The pictures of a cell's first victim."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as held:
            arrays = {name: torch.from_numpy(held[name]) for name in held.files}
        self._order = arrays.pop("order")[0].long()
        self._arrays = {name: value[0].float() for name, value in arrays.items()}

    def of(self, what: str) -> list[Tensor] | None:
        """`original`, `seed`, `reconstruction` or `iteration_N`; each image next to the one it is a guess of."""
        images = self._arrays.get(what)
        if images is None:
            return None
        return list(images if what == "original" else images[self._order])

    def first(self, what: str) -> Tensor | None:
        """The first of them."""
        images = self.of(what)
        return images[0] if images else None


def _images(table: Table, name: str, place: Place) -> Images | None:
    path = place.arrays(table.name, table.cells[name])
    return Images(path) if path.exists() else None


def _methods(table: Table, cells: Cells, place: Place) -> Image | None:  # noqa: ARG001
    from fedcdp.attacks.pictures import grid

    rows: list[list[Tensor]] = []
    names: list[str] = []
    for method in table.axes["method"]:
        both = [
            found
            for name in table.cells
            if table.cells[name].row.endswith(f"/{method}") and (found := _images(table, name, place))
        ]
        if len(both) != len(table.axes["leak"]):
            continue
        if not rows:
            rows, names = [[image for each in both for image in each.of("original") or []]], ["original"]
        rows.append([image for each in both for image in each.of("reconstruction") or []])
        names.append(method)
    if not rows:
        return None
    titles = ["type-2: one example", *(f"type-0&1: image {number} of the batch" for number in range(1, len(rows[0])))]
    return grid(rows, titles, names)


def _leakage(table: Table, cells: Cells, place: Place) -> Image | None:  # noqa: ARG001
    from fedcdp.attacks.pictures import grid

    found = {name: images for name in table.cells if (images := _images(table, name, place))}
    if not found:
        return None
    rows: list[list[Tensor | None]] = []
    names = []
    for name, images in found.items():
        for number, original in enumerate(images.of("original") or []):
            columns = [images.of("seed"), *(images.of(f"iteration_{step}") for step in _STEPS), images.of("reconstruction")]
            rows.append([original, *(each[number] if each else None for each in columns)])
            names.append(name if number == 0 else "")
    return grid(rows, ["original", "seed", *(f"iteration {step}" for step in _STEPS), "end"], names)


def _compression(table: Table, cells: Cells, place: Place) -> Image | None:  # noqa: ARG001
    from fedcdp.attacks.pictures import grid

    shares = list(table.axes["pruned"])
    rows: list[list[Tensor | None]] = []
    names = []
    for variant in table.variants_of(f"leakage/{shares[0]}"):
        found = [_images(table, f"leakage/{share}/{variant}", place) for share in shares]
        if any(found):
            rows.append([each.first("reconstruction") if each else None for each in found])
            names.append(variant)
            original = next(each.first("original") for each in found if each)
    if not rows:
        return None
    return grid([[original], *rows], [f"{share} pruned" for share in shares], ["original", *names])


def _curve(table: Table, cells: Cells, place: Place) -> Image | None:  # noqa: ARG001
    figure, axes = _figure(1)
    for name, cell in cells.items():
        rounds, norms = zip(*cell["curves"]["gradient_norm"], strict=True)
        axes[0].plot(rounds, norms, label=name)
    axes[0].set(xlabel="round", ylabel="mean L2 norm of the gradient", ylim=(0, None))
    return _as_image(figure)


def _tradeoff(table: Table, cells: Cells, place: Place) -> Image | None:  # noqa: ARG001
    figure, axes = _figure(len(cells))
    for each, (name, cell) in zip(axes, cells.items(), strict=True):
        rounds = [row["round"] for row in cell["followed"]]
        for key, style in (("bound_median", "-"), ("bound_q10", "--"), ("noise_norm", "k:")):
            each.plot(rounds, [row[key] for row in cell["followed"]], style, label=key.replace("_", " "))
        each.set(xlabel="round", title=name, yscale="log")
        each.legend(fontsize=8)
    return _as_image(figure)


def _figure(panels: int) -> tuple[Figure, list[Any]]:
    from matplotlib.figure import Figure  # not pyplot, which looks for a display

    figure = Figure(figsize=(4.2 * panels, 3.4), layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def _as_image(figure: Figure) -> Image:
    from PIL import Image as Images_

    written = io.BytesIO()
    figure.savefig(written, dpi=120, format="png")
    return Images_.open(written)


_PICTURES: dict[str, Callable[[Table, Cells, Place], Any]] = {
    "methods": _methods,
    "leakage": _leakage,
    "compression": _compression,
    "gradient-norm": _curve,
    "tradeoff": _tradeoff,
}
