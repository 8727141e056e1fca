"""Targets: the files of an attack, as the report page reads them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from fedcdp.report.api import report
from tools.fuzz.data import lying_npz, packed_npz, zero_bomb
from tools.fuzz.mutations import HOSTILE_TEXTS, as_json, mutate_bytes, mutate_value

Attempt = Callable[[Random, Path], None]


def attack_results(_place: Path) -> Attempt:
    """`summary.json` and `reconstructions.npz`: other values, shapes and types, false headers, bombs; up to the page."""
    summary = {"method": "fed-cdp", "leak": "type2", "attack": "cpl", "dataset": "mnist5k", "victims": 1, "examples": 2,
               "recognisable_rate": 0.5, "success_rate": 0.0, "steps": 1, "seconds": 1.5, "round": None,
               "tried": [{"attack": "cpl", "success_rate": 0.0}, {"attack": "matched-filter", "auc": 0.7},
                         {"attack": "linear-head", "success_rate": None, "refused": "another network"}]}  # fmt: skip
    image = np.linspace(0, 1, 2 * 16, dtype=np.float32).reshape(1, 2, 1, 4, 4)
    arrays: dict[str, Any] = {
        "seed": image, "reconstruction": image, "original": image, "original_label": np.array([[3, 7]]),
        "iterations": np.array([9]), "value_range": np.array([0.0, 1.0]), "snapshot_at": np.array([1, 5]),
        "snapshot": np.stack([image, image]), "mse": np.array([[0.1, 0.2]]), "order": np.array([[1, 0]]),
        "exact": np.array([[False, False]]), "recognisable": np.array([[True, False]]),
    }  # fmt: skip
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    sound = content.getvalue()

    def attempt(case: Random, place: Path) -> None:
        folder = place / "leak"
        folder.mkdir(exist_ok=True)
        told = as_json(summary)
        if case.random() < 0.5:
            told = mutate_bytes(case, told) if case.random() < 0.3 else as_json(mutate_value(case, summary))
        (folder / "summary.json").write_bytes(told)
        kind, held = case.random(), sound
        if kind < 0.2:
            held = mutate_bytes(case, sound)
        elif kind < 0.3:
            held = lying_npz(case)
        elif kind < 0.8:
            changed = dict(arrays)
            for name in case.sample(sorted(arrays), case.choice((1, 1, 2, 4))):
                changed[name] = _other(case, arrays[name])
            if case.random() < 0.1:
                changed[case.choice(HOSTILE_TEXTS[3:9])] = np.zeros(3)
            held = packed_npz(changed, zipfile.ZIP_DEFLATED)
        if case.random() < 0.002:
            held = zero_bomb()
        (folder / "reconstructions.npz").write_bytes(held)
        page = place / "page.html"
        page.unlink(missing_ok=True)
        text = report(folder, page).read_text(encoding="utf-8")
        if text.count("<script") > 1 or "javascript:" in text:
            raise AssertionError("a page with a script that is not its own")

    return attempt


def _other(case: Random, array: Any) -> Any:
    """An array of another shape or type, or with other values."""
    kind = case.randrange(5)
    if kind == 0:
        return array.reshape(case.choice([(-1,), (1, -1), (-1, 1, 1), array.shape[::-1]]))
    if kind == 1:
        return array[: case.randrange(len(array) + 1)]
    if kind == 2:
        return array.astype(case.choice(["f2", "f8", "i1", "u8", "c8", "U5", "bool", ">f4", "S3", "M8[s]"]))
    if kind == 3:
        return np.array(case.choice([np.nan, np.inf, -1, 2**63, 1e300, 0]))
    changed = array.astype("f8")
    changed.flat[case.randrange(changed.size)] = case.choice([np.nan, np.inf, -np.inf, 1e300, -5, 99])
    return changed


TARGETS: dict[str, Callable[[Path], Attempt]] = {"attack results, report page": attack_results}
