"""A picture of a demo: `python benchmarks/demo_picture.py runs/demo results/demo/reconstructions.png`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from fedcdp.attacks.pictures import grid, save
from fedcdp.report.api import gather
from fedcdp.report.subjects import subjects_of


def main(demo: Path, target: Path) -> None:
    """Rows: the originals, then each method; columns: three examples each for a type-2 and a type-0 adversary."""
    rows, names = [], []
    for subject in subjects_of(*gather([demo])):
        by_leak = {leak.leak: leak for leak in subject.leaks}
        examples = [example for leak in ("type2", "type0") for example in by_leak[leak].examples]
        if not rows:
            rows.append([torch.from_numpy(example.original) for example in examples])
            names.append("original")
        rows.append([torch.from_numpy(example.found) for example in examples])
        names.append(subject.name)
    titles = [f"{adversary}, example {number}" for adversary in ("type-2", "type-0") for number in (1, 2, 3)]
    save(grid(rows, titles, names, "What an adversary reconstructs. Made by fedcdp demo."), target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
