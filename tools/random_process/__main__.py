"""See the package."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F

from tools.random_process import packing, training
from tools.random_process.pictures import Draws, pictures
from tools.random_process.views import view


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(prog="python -m tools.random_process")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train the encoder")
    train.add_argument("--out", type=Path, required=True)
    train.add_argument("--steps", type=int, default=22_500)
    train.add_argument("--width", type=int, default=96)
    train.add_argument("--batch", type=int, default=training.BATCH)
    train.add_argument("--pool", type=int, default=training.POOL)
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--device", default="cuda")
    pack = commands.add_parser("pack", help="write the weights file of the package from a trained encoder")
    pack.add_argument("trained", type=Path)
    pack.add_argument("--count", type=int, default=8192, help="pictures for the means and covariances")
    pack.add_argument("--seed", type=int, default=1)
    pack.add_argument("--device", default="cpu")
    sheet = commands.add_parser("sheet", help="some pictures, and two views of each, as one image")
    sheet.add_argument("out", type=Path)
    given = vars(parser.parse_args())
    command = given.pop("command")
    if command == "train":
        training.train(given.pop("out"), **given)
    elif command == "pack":
        packing.pack(given.pop("trained"), **given)
    else:
        save_sheet(given["out"])


def save_sheet(out: Path, across: int = 16, down: int = 4) -> None:
    """Pictures in the upper half, two views of each of some in the lower half."""
    from PIL import Image

    draws = Draws(0, "cpu")
    drawn = pictures(across * down, draws)
    some = drawn[: across * down // 2]
    pairs = torch.stack([view(some, draws), view(some, draws)], 1).flatten(0, 1)
    tiles = torch.cat([F.interpolate(each, 64) for each in (drawn, pairs)])
    rows = tiles.unflatten(0, (-1, across)).permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
    Image.fromarray((255 * rows).byte().numpy()).save(out)


if __name__ == "__main__":
    main()
