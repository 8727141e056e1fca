"""Bad input: exit status 2, one line on standard error that says what is wrong, and nothing touched on disk."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fedcdp.config.experiment import assemble
from fedcdp.files.tensors import load_tensors, save_tensors
from fedcdp.training.trainer import train_experiment

CANCER = ["train", "--quiet", "--dataset", "cancer", "--clients", "8", "--per-round", "4", "--local-steps", "2"]
NEW = [*CANCER, "--out", "new"]

Cli = Callable[..., Any]


def tree(place: Path) -> dict[str, bytes | None]:
    """Everything under a directory, with its content."""
    return {str(path.relative_to(place)): path.read_bytes() if path.is_file() else None for path in place.rglob("*")}


@pytest.fixture
def refused(cli: Cli, workplace: Path) -> Callable[..., str]:
    """Run a command that must be refused; its one line."""

    def call(*arguments: object) -> str:
        before = tree(workplace)
        outcome = cli(*arguments)
        assert outcome.status == 2, outcome
        assert outcome.stdout == ""
        assert outcome.stderr.startswith("fedcdp: "), outcome.stderr
        assert outcome.stderr.count("\n") == 1, outcome.stderr
        after = {name: content for name, content in tree(workplace).items() if "__pycache__" not in name}
        assert {name: after.get(name, "gone") for name in before} == before
        assert after.keys() == before.keys()
        return str(outcome.stderr)

    return call


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--dataset", "nosuch"], "'nosuch'"),
        (["--method", "nosuch"], "method: 'nosuch'"),
        (["--nosuch"], "--nosuch"),
        (["--per-round", 9], "per_round: 9"),
        (["--clients", 0], "clients"),
        (["--noise-multiplier", -1], "noise_multiplier: -1"),
        (["--noise-multiplier", "nan"], "noise_multiplier: nan"),
        (["--rounds", "x"], "'--rounds': 'x'"),
        (["--rounds", 0], "rounds: 0"),
        (["--rounds", "2.5"], "'2.5'"),
        (["--batch-size", -3], "batch_size: -3"),
        (["--clip", 0], "clip"),
        (["--clip", "linear(6)"], "'linear(6)'"),
        (["--clip", "linear(6, 2)", "--clip-end", 2], "clip"),
        (["--clip-end", 2], "--clip-end"),
        (["--method", "fed-cdp-decay", "--clip", 4], "fed-cdp-decay needs a bound that decays"),
        (["--lr", "fast"], "learning_rate: 'fast'"),
        (["--ema", 1], "ema: 1"),
        (["--seed", -1], "seed: -1"),
        (["--split-seed", -1], "split_seed"),
        (["--chunk", 0], "chunk: 0"),
        (["--evaluate-every", 0], "evaluate_every: 0"),
        (["--engine", "nosuch"], "engine: 'nosuch'"),
        (["--partition", "nosuch"], "'nosuch'"),
        (["--partition", "iid", "--records", 10_000], "records is 10000"),
        (["--partition", "dirichlet", "--alpha", 0], "alpha"),
        (["--partition", "dirichlet-sizes", "--size-ratio", 0.5], "size_ratio"),
        (["--partition", "dirichlet-sizes", "--smallest", 0], "smallest"),
        (["--partition", "exponential"], "use fewer clients"),
        (["--partition", "linear", "--records", 5], "records"),
        (["--partition", "natural"], "natural"),
        (["--activation", "nosuch"], "activation: 'nosuch'"),
        (["--preset", "nosuch"], "preset: 'nosuch'"),
        (["--set", "nosuch=1"], "nosuch"),
        (["--set", "plan.nosuch=1"], "plan.nosuch"),
        (["--set", "nosuch.rounds=1"], "nosuch.rounds"),
        (["--set", "rounds"], "--set rounds"),
        (["--set", "rounds=many"], "rounds: 'many'"),
        (["--set", "clip=[1]"], "clip: [1]"),
        (["--set", "standardise=1"], "standardise: 1"),
        (["--set", "device=3"], "device: 3"),
        (["--config", "nosuch.toml"], "nosuch.toml cannot be read"),
        (["--config", "."], ". cannot be read"),
        (["--data", "own.npz"], "not both"),
        (["--model", "nosuch"], "model: 'nosuch'"),
        (["--model", "cnn"], "cnn needs images"),
        (["--model", "nosuch_module:make"], "nosuch_module"),
        (["--model", "json:nosuch"], "nosuch"),
        (["--model", ":make"], ":make"),
        (["--model", "json:dumps"], "json:dumps"),
        (["--model", "os:sep"], "os:sep"),
        (["--model", "builtins:dict"], "dict"),
        (["--device", "nosuch"], "device: nosuch"),
        (["--device", "meta"], "device: meta"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_a_setting_that_cannot_be_is_refused(refused: Callable[..., str], options: list[object], named: str) -> None:
    assert named in refused(*NEW, *options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused(refused: Callable[..., str]) -> None:
    assert "device: cuda cannot be used" in refused(*NEW, "--device", "cuda")


@pytest.mark.parametrize(
    "command",
    [
        ["train", "--dataset", "nosuch", "--out", "new"],
        ["train", "--data", "nosuch.csv", "--out", "new"],
        ["train", "--dataset", "cancer", "--per-round", "4000", "--out", "new"],
        ["train", "--dataset", "cancer", "--model", "cnn", "--out", "new"],
    ],
    ids=lambda command: " ".join(command[1:5]),
)
def test_the_line_stands_alone_also_where_progress_would_be_shown(
    refused: Callable[..., str], command: list[object]
) -> None:
    refused(*command)


def test_no_out_is_refused(refused: Callable[..., str]) -> None:
    assert "--out" in refused(*CANCER)


def test_an_unknown_command_is_refused(refused: Callable[..., str]) -> None:
    assert "nosuch" in refused("nosuch")


@pytest.mark.parametrize(
    ("written", "named"),
    [
        ("[plan\nrounds = 3\n", "is not a TOML file"),
        ("[nosuch]\nrounds = 3\n", "nosuch is not one of the sections"),
        ("rounds = 3\n", "rounds is not one of the sections"),
        ("[plan]\nnosuch = 3\n", "plan.nosuch"),
        ("[plan]\nrounds = '3'\n", "rounds: '3' is not a whole number"),
        ("[plan]\nrounds = 1979-05-27\n", "rounds"),
        ("[plan]\nclip = {start = 6}\n", "clip"),
        ("[data]\nrecords = 1.5\n", "records: 1.5"),
        ("[plan]\nmomentum = true\n", "momentum: True"),
        ("[run]\nevaluate_every = 0\n", "evaluate_every: 0"),
        ("\0", "is not a TOML file"),
    ],
    ids=repr,
)
def test_a_configuration_that_cannot_be_is_refused(refused: Callable[..., str], written: str, named: str) -> None:
    Path("my.toml").write_text(written)
    assert named in refused("train", "--quiet", "--config", "my.toml", "--out", "new")


def test_a_configuration_that_is_not_text_is_refused(refused: Callable[..., str]) -> None:
    Path("my.toml").write_bytes(b"\xff\xfe[plan]")
    assert "my.toml is not a TOML file" in refused("train", "--quiet", "--config", "my.toml", "--out", "new")


# networks of the user's ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "source", "named"),
    [
        ("raises", "def make():\n    raise KeyError('boom')\n", "boom"),
        ("asks_more", "def make(width):\n    pass\n", "width"),
        ("no_network", "def make():\n    return 3\n", "int"),
        ("syntax", "def make(:\n", "syntax"),
        ("fails_to_import", "1 / 0\n", "division by zero"),
        ("misses_a_package", "import nosuch_package\n", "nosuch_package"),
        ("wrong_size", "from torch import nn\ndef make():\n    return nn.Linear(5, 2)\n", "network"),
        ("mixes", "from torch import nn\ndef make():\n    return nn.BatchNorm1d(30)\n", "GroupNorm"),
        ("nothing_to_train", "from torch import nn\ndef make():\n    return nn.Flatten()\n", "no trainable parameter"),
    ],
)
def test_a_network_of_ones_own_that_cannot_be_used_is_refused(
    refused: Callable[..., str], module: str, source: str, named: str
) -> None:
    Path(f"bad_{module}.py").write_text(source)
    assert named in refused(*NEW, "--model", f"bad_{module}:make")


# data of the user's --------------------------------------------------------------------------------------------------


def test_a_missing_data_file_is_refused(refused: Callable[..., str]) -> None:
    for name in ("nosuch.npz", "nosuch.csv"):
        assert f"{name} does not exist" in refused("train", "--quiet", "--data", name, "--out", "new")


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.01, 0.5, 0.99])
def test_a_truncated_npz_is_refused(refused: Callable[..., str], own_npz: Path, kept: float) -> None:
    content = own_npz.read_bytes()
    own_npz.write_bytes(content[: int(kept * len(content))])
    assert "own.npz cannot be read" in refused("train", "--quiet", "--data", own_npz.name, "--out", "new")


def test_a_damaged_npz_is_refused(refused: Callable[..., str], own_npz: Path) -> None:
    content = bytearray(own_npz.read_bytes())
    content[len(content) // 2] ^= 0xFF
    own_npz.write_bytes(content)
    assert "own.npz cannot be read" in refused("train", "--quiet", "--data", own_npz.name, "--out", "new")


@pytest.mark.parametrize(
    "content",
    [b"", b"a,label\n", b"a,label\n1,x\nz,y\n", b"a,label\n1,x\n2\n", b"a,label\n\xff\xfe,x\n", b"a,label\n1,x\n2,x\n"],
    ids=["empty", "no records", "no number", "short line", "no text", "one class"],
)
def test_a_csv_that_is_no_table_of_examples_is_refused(refused: Callable[..., str], content: bytes) -> None:
    Path("own.csv").write_bytes(content)
    assert "own.csv" in refused("train", "--quiet", "--data", "own.csv", "--out", "new")


def test_data_that_are_too_few_for_the_clients_are_refused(refused: Callable[..., str]) -> None:
    np.savez("own.npz", x=np.zeros((8, 2)), y=np.arange(8) % 2)
    assert "clients is 10" in refused("train", "--quiet", "--data", "own.npz", "--out", "new")


def test_a_benchmark_that_cannot_be_had_is_refused(refused: Callable[..., str]) -> None:
    assert "mnist needs" in refused("train", "--quiet", "--dataset", "mnist", "--data-dir", ".", "--out", "new")


# where a run goes ----------------------------------------------------------------------------------------------------


def test_an_existing_run_is_never_overwritten(refused: Callable[..., str], run: Path) -> None:
    assert "already exists" in refused(*CANCER, "--out", run)


def test_a_directory_with_anything_in_it_is_never_written_to(refused: Callable[..., str]) -> None:
    Path("thesis").mkdir()
    Path("thesis/chapter1.tex").write_text("dear reader")
    assert "already exists" in refused(*CANCER, "--out", "thesis")


def test_an_out_that_is_a_file_is_refused(refused: Callable[..., str]) -> None:
    Path("thesis.tex").write_text("dear reader")
    assert "thesis.tex" in refused(*CANCER, "--out", "thesis.tex")
    assert "thesis.tex/run cannot be written" in refused(*CANCER, "--out", "thesis.tex/run")


def test_an_out_whose_name_is_too_long_is_refused(refused: Callable[..., str]) -> None:
    assert "cannot be written" in refused(*CANCER, "--out", "n" * 300)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc, where even root creates nothing")
def test_an_out_in_a_place_that_cannot_be_written_is_refused(refused: Callable[..., str]) -> None:
    assert "cannot be written" in refused(*CANCER, "--out", "/proc/fedcdp-run")


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_an_out_that_may_not_be_written_or_looked_at_is_refused(refused: Callable[..., str], workplace: Path) -> None:
    locked = workplace / "locked"
    locked.mkdir()
    for mode in (0o500, 0o600):
        locked.chmod(mode)
        try:
            assert "cannot be written" in refused(*CANCER, "--out", "locked/run")
        finally:
            locked.chmod(0o700)


@pytest.mark.parametrize("out", ["thesis", "thesis/chapter1.tex", "thesis/chapter1.tex/run"])
def test_a_bad_out_is_refused_before_anything_is_planned(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    def planned(*_: object, **__: object) -> None:
        pytest.fail("calibration started")

    Path("thesis").mkdir()
    Path("thesis/chapter1.tex").write_text("dear reader")
    monkeypatch.setattr("fedcdp.cli.train.plan_experiment", planned)
    assert out in refused(*CANCER, "--target-epsilon", "1", "--out", out)


# checkpoints and models ----------------------------------------------------------------------------------------------


def with_header(content: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """A safetensors file with another header over the same bytes."""
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    changed = change(header)
    written = json.dumps(header if changed is None else changed).encode()
    return struct.pack("<Q", len(written)) + written + content[8 + length :]


def entry(header: dict[str, Any]) -> dict[str, Any]:
    """The header's first tensor."""
    return next(value for name, value in header.items() if name != "__metadata__")


def _longer(header: dict[str, Any]) -> None:
    entry(header)["data_offsets"][1] += 10**9


def _larger(header: dict[str, Any]) -> None:
    entry(header)["shape"] = [10**6, 10**6]


def _whole_numbers(header: dict[str, Any]) -> None:
    for name, value in header.items():
        if name != "__metadata__":
            value["dtype"] = "I32"


def _without_metadata(header: dict[str, Any]) -> None:
    del header["__metadata__"]


def _fewer(header: dict[str, Any]) -> None:
    del header[next(name for name in header if name != "__metadata__")]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",  # noqa: ARG005
    "four bytes": lambda content: content[:4],
    "the length alone": lambda content: content[:8],
    "half a header": lambda content: content[:60],
    "half the tensors": lambda content: content[: len(content) // 2],
    "one byte short": lambda content: content[:-1],
    "one byte more": lambda content: content + b"\0",
    "a length beyond the file": lambda content: struct.pack("<Q", 2**40) + content[8:],
    "a length beyond all files": lambda content: b"\xff" * 8 + content[8:],
    "a length of nothing": lambda content: bytes(8) + content[8:],
    "a flipped byte in the header": lambda content: content[:9] + bytes([content[9] ^ 0xFF]) + content[10:],
    "a pickle": lambda content: b"\x80\x04K\x01.",  # noqa: ARG005
    "a tensor said to be longer": lambda content: with_header(content, _longer),
    "a tensor said to be larger": lambda content: with_header(content, _larger),
    "a tensor left out": lambda content: with_header(content, _fewer),
    "a list for a header": lambda content: with_header(content, lambda header: list(header)),
    "no tensors": lambda content: struct.pack("<Q", 2) + b"{}",  # noqa: ARG005
    "no metadata": lambda content: with_header(content, _without_metadata),
    "tensors said to be whole numbers": lambda content: with_header(content, _whole_numbers),
}
OTHER_WORDS: dict[str, dict[str, Any]] = {
    "of another program": {"format": "somebody-elses-1"},
    "of no round": {"round": "three"},
    "of a round before the first": {"round": -1},
    "of a round that the plan does not have": {"round": 4000},
    "of another plan": {"plan": "0123456789abcdef"},
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_kept(refused: Callable[..., str], run: Path, damage: str) -> None:
    checkpoint = run / "checkpoint.safetensors"
    checkpoint.write_bytes(DAMAGE[damage](checkpoint.read_bytes()))
    assert str(checkpoint) in refused("train", "--quiet", "--resume", "--out", run)


@pytest.mark.parametrize("words", OTHER_WORDS)
def test_a_whole_checkpoint_that_does_not_belong_is_refused(refused: Callable[..., str], run: Path, words: str) -> None:
    checkpoint = run / "checkpoint.safetensors"
    tensors, about = load_tensors(checkpoint, "checkpoint-1")
    save_tensors(checkpoint, tensors, about | OTHER_WORDS[words])
    assert str(checkpoint) in refused("train", "--quiet", "--resume", "--out", run)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_model_is_not_evaluated(refused: Callable[..., str], run: Path, damage: str) -> None:
    model = run / "model.safetensors"
    model.write_bytes(DAMAGE[damage](model.read_bytes()))
    assert str(model) in refused("evaluate", run)


def test_the_checkpoint_of_another_network_is_refused(refused: Callable[..., str], run: Path, tmp_path: Path) -> None:
    other = {"data": {"dataset": "cancer", "clients": 8}, "plan": {"per_round": 4, "rounds": 1, "local_steps": 1}}
    Path("narrow.py").write_text("from torch import nn\ndef make():\n    return nn.Linear(30, 2)\n")
    train_experiment(assemble(other, {"model": {"network": "narrow:make"}}), tmp_path / "other", quiet=True)
    tensors, _ = load_tensors(tmp_path / "other/checkpoint.safetensors", "checkpoint-1")
    _, about = load_tensors(run / "checkpoint.safetensors", "checkpoint-1")
    save_tensors(run / "checkpoint.safetensors", tensors, about)
    assert "holds other tensors" in refused("train", "--quiet", "--resume", "--out", run)


def test_a_checkpoint_with_an_average_is_refused_where_the_plan_has_none(refused: Callable[..., str], run: Path) -> None:
    checkpoint = run / "checkpoint.safetensors"
    tensors = load_file(checkpoint)
    averages = {name.replace("weights/", "average/"): value.clone() for name, value in tensors.items()}
    save_file(tensors | averages, checkpoint, {"format": "fedcdp-checkpoint-1", "round": "3"})
    assert str(checkpoint) in refused("train", "--quiet", "--resume", "--out", run)


@pytest.mark.parametrize("line", [b'{"round": 1, "cli', b"[]", b"7", b'{"accuracy": 1.0}', b"\xff\xfe"])
def test_damaged_metrics_are_refused_and_kept(refused: Callable[..., str], run: Path, line: bytes) -> None:
    metrics = run / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines()
    metrics.write_bytes(b"\n".join([lines[0], line, *lines[1:]]) + b"\n")
    assert "metrics.jsonl" in refused("train", "--quiet", "--resume", "--out", run)


def test_a_damaged_configuration_of_a_run_is_refused(refused: Callable[..., str], run: Path) -> None:
    (run / "config.toml").write_text("[plan]\nrounds = 'three'\n")
    for command in (["train", "--quiet", "--resume", "--out", run], ["evaluate", run]):
        assert "rounds: 'three'" in refused(*command)


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--seed", 3, "seed: the run in run was started with 0, not 3"),
        ("--clip", 2, "clip: the run in run was started with 4"),
        ("--rounds", 30, "rounds: the run in run was started with 3, not 30"),
        ("--method", "nonprivate", "method: the run in run was started with fed-cdp, not nonprivate"),
        ("--clients", 9, "clients"),
        ("--activation", "tanh", "activation"),
        ("--dataset", "mnist5k", "dataset"),
        ("--set", "noise_multiplier=1", "noise_multiplier"),
    ],
)
def test_a_resumed_run_keeps_to_what_it_was_started_with(
    refused: Callable[..., str], run: Path, option: str, value: object, named: str
) -> None:
    assert named in refused("train", "--quiet", "--resume", "--out", run.name, option, value)


def test_a_directory_that_is_no_run_is_refused(refused: Callable[..., str]) -> None:
    Path("empty").mkdir()
    for place in ("empty", "nosuch"):
        for command in (
            ["train", "--quiet", "--resume", "--out", place],
            ["evaluate", place],
            ["export", place, "--to", "x"],
        ):
            assert f"{place} is not a run directory" in refused(*command)


def test_a_run_without_a_round_has_nothing_to_evaluate(refused: Callable[..., str], run: Path) -> None:
    (run / "model.safetensors").unlink()
    (run / "checkpoint.safetensors").unlink()
    assert "not one round is done" in refused("evaluate", run)


@pytest.mark.parametrize("split", ["test", "nosuch"])
def test_a_split_that_is_not_there_is_refused(refused: Callable[..., str], run: Path, split: str) -> None:
    assert f"cancer has train, validation, not '{split}'" in refused("evaluate", run, "--split", split)


# export --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["safetensors", "torchscript", "onnx", "csv", "tensorboard"])
def test_an_export_never_overwrites(refused: Callable[..., str], run: Path, form: str) -> None:
    Path("mine").write_text("precious")
    assert "mine already exists" in refused("export", run, "--format", form, "--to", "mine")


def test_an_export_in_an_unknown_format_is_refused(refused: Callable[..., str], run: Path) -> None:
    assert "format: 'nosuch' is not one of safetensors" in refused("export", run, "--format", "nosuch", "--to", "x")


@pytest.mark.parametrize("form", ["safetensors", "torchscript", "csv"])
@pytest.mark.parametrize("to", ["nosuch/model", "n" * 300], ids=["no such directory", "a name too long"])
def test_an_export_that_cannot_be_written_is_refused(refused: Callable[..., str], run: Path, form: str, to: str) -> None:
    assert "cannot be written" in refused("export", run, "--format", form, "--to", to)


def test_an_export_to_nowhere_is_refused(refused: Callable[..., str], run: Path) -> None:
    assert "--to" in refused("export", run)
