"""What the commands print and write of a private run is the same on neighbouring data, with the release held fixed.

Commands that a user runs on a finished run are watched as the training is: `evaluate`, `export` in all formats, `account`.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcdp.cli.program import app
from tests.support.run_output import Seen, differences

RunTwice = Callable[..., list[Seen]]

TRAIN = ["train", "--data", "points.npz", "--clients", "4", "--per-round", "4", "--rounds", "2", "--local-steps", "2",
         "--batch-size", "4", "--record-sampling", "partition", "--out", "run"]  # fmt: skip
METHODS = {
    "fed-cdp": ["--method", "fed-cdp"],
    "fed-sdp": ["--method", "fed-sdp", "--noise-at", "client", "--ema", "0.9"],
}
BOARD, PROGRAM = "board", "model.torchscript"
AFTER = [
    ["evaluate", "run"],
    ["account", "--run", "run", "--json"],
    ["train", "--out", "run", "--resume", "--json"],
    ["report", "run", "--out", "page.html"],
    *(["export", "run", "--format", form, "--to", f"model.{form}"] for form in ("safetensors", "torchscript", "csv")),
]
if importlib.util.find_spec("tensorboard"):
    AFTER.append(["export", "run", "--format", "tensorboard", "--to", BOARD])


def points(changed: float = 0.0) -> dict[str, np.ndarray]:
    """48 records of three classes; one for training may be another (of the same class, lest the split be another, too)."""
    generator = np.random.default_rng(7)
    inputs = generator.normal(size=(48, 5)).astype(np.float32)
    if changed:
        inputs[1] = changed
    return {"x": inputs, "y": np.arange(48) % 3}


def commands(*lines: list[str]) -> Callable[[dict[str, np.ndarray]], None]:
    def action(given: dict[str, np.ndarray]) -> None:
        np.savez("points.npz", **given)
        for line in lines:
            app(line, standalone_mode=False)
        Path("points.npz").unlink()  # the records themselves, which lie where they lay
        show_formats()

    return action


def show_formats() -> None:
    """All that is in files whose bytes also say how many a process has written, or when a thread of its own did."""
    if Path(PROGRAM).exists():
        program = torch.jit.load(PROGRAM)
        print([node.kind() for node in program.inlined_graph.nodes()], program.state_dict())
        Path(PROGRAM).unlink()
    if Path(BOARD).exists():
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        logging.getLogger("tensorboard").setLevel(logging.WARNING)  # tells which file is read
        for path in Path(BOARD).rglob("events*"):
            print([(event.step, str(event.summary), event.file_version) for event in EventFileLoader(str(path)).Load()])
        shutil.rmtree(BOARD)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_command_of_a_private_run_prints_and_writes_the_same(run_twice: RunTwice, method: list[str]) -> None:
    first, *others = run_twice(commands(TRAIN + method, *AFTER), [points(), points(3e38)])
    assert (first.failed, first.written, first.connected) == (None, set(), [])
    assert "accuracy" in first.console
    assert "epsilon" in first.console
    assert not importlib.util.find_spec("tensorboard") or "simple_value" in first.console or "float_val" in first.console
    assert {"model.csv", "model.safetensors", "page.html"} <= set(first.files)
    for other in others:
        assert differences(first, other) == {}


def test_what_is_computed_from_training_data_says_that_no_guarantee_covers_it(run_twice: RunTwice) -> None:
    asked = (["evaluate", "run", "--json", *more] for more in (["--split", "train"], ["--per-client"]))
    (seen,) = run_twice(commands(TRAIN + METHODS["fed-cdp"], *asked), [points()])
    assert seen.console.count("no privacy guarantee covers this figure") == 2


def test_an_exported_program_carries_no_record(run_twice: RunTwice) -> None:
    given = points()
    lines = commands(TRAIN + METHODS["fed-cdp"], ["export", "run", "--format", "torchscript", "--to", "model.pt"])
    (seen,) = run_twice(lines, [given])
    with zipfile.ZipFile(seen.place / "model.pt") as archive:
        content = b"".join(archive.read(name) for name in archive.namelist())
    assert not any(record.tobytes() in content for record in given["x"])


@pytest.mark.parametrize(("line", "secret"), [("0.5,17.125\n0.5,\n", "17.125"), ("0.5,0\nseventeen,1\n", "seventeen")])
def test_an_error_names_the_line_of_a_file_and_not_what_is_in_it(run_twice: RunTwice, line: str, secret: str) -> None:
    def action(text: str) -> None:
        Path("points.csv").write_text(f"height,label\n{text}")
        app([*TRAIN[:1], "--data", "points.csv", *TRAIN[3:], *METHODS["fed-cdp"]], standalone_mode=False)

    (seen,) = run_twice(action, [line])
    assert seen.failed is not None
    assert "line 3" in seen.failed
    assert secret not in seen.failed + seen.console + json.dumps(seen.log)


def test_a_network_that_fails_on_a_record_does_not_quote_it(run_twice: RunTwice) -> None:
    """The text of its own error is not shown, for a network may put its inputs there."""
    factory = (
        "import torch\n"
        "class Touchy(torch.nn.Linear):\n"
        "    def forward(self, inputs):\n"
        "        if 'nan' not in str(inputs) and '17.' in str(inputs):\n"
        "            raise ValueError(f'I do not like {inputs}')\n"
        "        return super().forward(inputs)\n"
        "def touchy(input_shape, classes):\n"
        "    return Touchy(input_shape[0], classes)\n"
    )

    def action(given: dict[str, np.ndarray]) -> None:
        Path("touchy_network.py").write_text(factory)
        np.savez("points.npz", **given)
        app([*TRAIN, *METHODS["fed-cdp"], "--model", "touchy_network:touchy"], standalone_mode=False)

    (seen,) = run_twice(action, [{"x": np.full((48, 5), 17.125, np.float32), "y": np.arange(48) % 3}])
    assert seen.failed is not None
    assert "on the first client's records though not on zeros (ValueError)" in seen.failed
    assert "17." not in seen.failed + seen.console + json.dumps(seen.log)
