"""Features of frozen layers: computed once per task, kept on the client alone, and deleted with the run."""

from __future__ import annotations

import stat
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("flwr")

from flwr.app import Message

from fedcdp.config.experiment import ModelSettings
from fedcdp.deploy.protocol import kept_features, local_round
from fedcdp.deploy.protocol.kept_features import KeptFeatures, forget_features, without_front
from fedcdp.deploy.protocol.server import serve
from fedcdp.files.tensors import load_tensors
from fedcdp.models.networks import build
from tests.support.local_grid import CLIENTS, LocalGrid, experiment, make_nodes, settings

CPU = torch.device("cpu")
INPUTS = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))


def network(scale: float = 1.0) -> nn.Sequential:
    """A frozen layer before a trained one."""
    frozen = nn.Linear(6, 5).requires_grad_(False)
    nn.init.constant_(frozen.weight, scale)
    nn.init.zeros_(frozen.bias)
    return nn.Sequential(frozen, nn.Tanh(), nn.Linear(5, 2))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of examples in each computation of features, all of which are worth keeping here."""
    counted: list[int] = []
    through = kept_features.through

    def counting(front: nn.Module | None, inputs: Tensor, device: torch.device) -> Any:
        if front is not None:
            counted.append(len(inputs))
        return through(front, inputs, device)

    monkeypatch.setattr(kept_features, "_WORTH_KEEPING", -1.0)
    monkeypatch.setattr(kept_features, "through", counting)
    return counted


def files(state: Path) -> list[Path]:
    return sorted(state.glob("features-*"))


def test_features_are_computed_once_and_readable_by_their_owner_only(tmp_path: Path, computed: list[int]) -> None:
    kept = KeptFeatures(tmp_path, "a" * 32)
    rest, first = without_front(network(), INPUTS, CPU, kept)
    again = without_front(network(), INPUTS, CPU, kept)[1]
    assert computed == [40]
    assert isinstance(first, Tensor)
    assert isinstance(again, Tensor)
    assert torch.equal(first, again)
    assert [name for name, _ in rest.named_parameters()] == ["2.weight", "2.bias"]
    assert torch.equal(first, network()[:2](INPUTS))
    (file,) = files(tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("changed", ["records", "layers", "task"])
def test_features_of_anything_else_are_not_used_and_take_their_place(
    tmp_path: Path, computed: list[int], changed: str
) -> None:
    without_front(network(), INPUTS, CPU, KeptFeatures(tmp_path, "a" * 32))
    (before,) = files(tmp_path)
    other = network(2.0 if changed == "layers" else 1.0)
    inputs = INPUTS + 1 if changed == "records" else INPUTS
    found = without_front(other, inputs, CPU, KeptFeatures(tmp_path, ("b" if changed == "task" else "a") * 32))[1]
    assert isinstance(found, Tensor)
    assert torch.equal(found, other[:2](inputs))
    assert computed == [40, 40]
    (after,) = files(tmp_path)
    assert after != before


def test_a_damaged_file_is_computed_again(tmp_path: Path, computed: list[int]) -> None:
    kept = KeptFeatures(tmp_path, "a" * 32)
    first = without_front(network(), INPUTS, CPU, kept)[1]
    (file,) = files(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    again = without_front(network(), INPUTS, CPU, kept)[1]
    assert computed == [40, 40]
    assert isinstance(first, Tensor)
    assert isinstance(again, Tensor)
    assert torch.equal(first, again)


def test_cheap_features_and_those_that_cannot_be_written_are_computed_each_time(
    tmp_path: Path, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = KeptFeatures(tmp_path / "missing" / "folder", "a" * 32)
    (tmp_path / "missing").write_text("a file")
    for _ in range(2):
        without_front(network(), INPUTS, CPU, nowhere)
    monkeypatch.setattr(kept_features, "_WORTH_KEEPING", 60.0)
    for _ in range(2):
        without_front(network(), INPUTS, CPU, KeptFeatures(tmp_path, "a" * 32))
    assert computed == [40] * 4
    assert files(tmp_path) == []


def test_features_of_one_task_or_of_all_are_forgotten(tmp_path: Path, computed: list[int]) -> None:
    without_front(network(), INPUTS, CPU, KeptFeatures(tmp_path, "a" * 32))
    forget_features(tmp_path, "b" * 32)
    assert len(files(tmp_path)) == 1
    forget_features(tmp_path, "a" * 32)
    assert files(tmp_path) == []
    assert computed == [40]


def test_a_run_computes_them_once_per_client_and_leaves_none_behind(tmp_path: Path, computed: list[int]) -> None:
    wanted = replace(experiment(per_round=CLIENTS), model=ModelSettings(network="linear"))
    kept: list[int] = []
    nodes = make_nodes(tmp_path)

    def look(_: Message, reply: Message) -> Message:
        kept.append(len(list(tmp_path.glob("client-*/features-*"))))
        return reply

    for node in nodes.values():
        node.twist = look
    assert serve(LocalGrid(nodes), wanted, tmp_path / "kept", settings(reproducible=True)).ended == "done"
    assert sorted(computed) == [20] * CLIENTS + [143]  # and the server those of its validation records, once
    assert kept[-1] == CLIENTS
    assert list(tmp_path.glob("client-*/features-*")) == []


def test_features_that_are_kept_change_no_model(
    tmp_path: Path, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = replace(experiment(per_round=CLIENTS), model=ModelSettings(network="linear"))
    serve(LocalGrid(make_nodes(tmp_path / "a")), wanted, tmp_path / "kept", settings(reproducible=True))
    monkeypatch.setattr(kept_features, "_WORTH_KEEPING", 60.0)
    serve(LocalGrid(make_nodes(tmp_path / "b")), wanted, tmp_path / "not", settings(reproducible=True))
    assert sorted(computed) == [20] * CLIENTS * (1 + wanted.plan.rounds) + [143, 143]
    one, other = (load_tensors(tmp_path / name / "model.safetensors", "model-1")[0] for name in ("kept", "not"))
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name])


def test_a_network_is_described_for_a_new_task_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Describing some networks takes longer than a round: torch imports a compiler to follow complex numbers."""
    built = Counter[str]()

    def counting(*given: Any) -> nn.Module:
        built[torch.get_default_device().type] += 1
        return build(*given)

    monkeypatch.setattr(local_round, "build", counting)
    serve(LocalGrid(make_nodes(tmp_path)), experiment(per_round=CLIENTS), tmp_path / "run", settings())
    assert built == {"meta": CLIENTS, "cpu": CLIENTS * (1 + 3)}
