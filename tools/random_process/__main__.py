"""See the package."""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.random_process import training


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(prog="python -m tools.random_process")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train the encoder")
    train.add_argument("--out", type=Path, required=True)
    train.add_argument("--steps", type=int, default=23_000)
    train.add_argument("--width", type=int, default=96)
    train.add_argument("--batch", type=int, default=training.BATCH)
    train.add_argument("--pool", type=int, default=training.POOL)
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--device", default="cuda")
    given = vars(parser.parse_args())
    given.pop("command")
    training.train(given.pop("out"), **given)


if __name__ == "__main__":
    main()
