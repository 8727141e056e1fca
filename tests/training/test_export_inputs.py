"""Exports of networks on token ids and on several named inputs, read back; and evaluation of their clients by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedcdp
from fedcdp.data.dataset import Dataset
from fedcdp.errors import RunError
from fedcdp.files.tree import Inputs
from fedcdp.models.networks import outputs_of
from fedcdp.training.export import _no_records
from fedcdp.training.run import Run
from tests.support.made_runs import made_run

VOCABULARY, TOKENS = 11, 5
IDS = torch.randint(VOCABULARY, (12, TOKENS), generator=torch.Generator().manual_seed(1))
MASK = (torch.arange(TOKENS) < torch.arange(12)[:, None] % TOKENS + 1).long()


class Tagger(nn.Module):
    """The mean of the embeddings that a mask keeps."""

    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        self.embedding, self.head, self.wrapped = nn.Embedding(VOCABULARY, 3), nn.Linear(3, 2), wrapped

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        kept = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        values = (self.embedding(input_ids) * kept[..., None]).sum(1) / kept.sum(1, keepdim=True).clamp(min=1)
        return SimpleNamespace(logits=self.head(values)) if self.wrapped else self.head(values)


CASES: dict[str, tuple[nn.Module, Inputs]] = {
    "token ids": (nn.Sequential(nn.Embedding(VOCABULARY, 3), nn.Flatten(), nn.Linear(15, 2)), IDS),
    "token ids, an object with logits": (Tagger(True), IDS),
    "named inputs": (Tagger(False), {"input_ids": IDS, "attention_mask": MASK}),
    "named inputs in another order": (Tagger(False), {"attention_mask": MASK, "input_ids": IDS}),
    "named inputs, an object with logits": (Tagger(True), {"input_ids": IDS, "attention_mask": MASK}),
}


def trained_on(network: nn.Module, data: Dataset) -> Run:
    return made_run(network, fedcdp.partition(data, clients=2, scheme="iid", validation=data))


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Run, list[Tensor], Tensor]:
    """A trained model, its inputs one by one, and its outputs."""
    network, inputs = CASES[request.param]
    trained = trained_on(network, Dataset(inputs, torch.arange(12) % 2, 2))
    with torch.no_grad():
        return trained, list(inputs.values()) if isinstance(inputs, dict) else [inputs], outputs_of(network, inputs)


def test_safetensors_hold_the_weights(case: tuple[Run, list[Tensor], Tensor], tmp_path: Path) -> None:
    trained, _, _ = case
    found = load_file(trained.export(tmp_path / "out.safetensors"))
    assert all(torch.equal(found[name], value) for name, value in trained.model.state_dict().items())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_torchscript_answers_as_the_model(case: tuple[Run, list[Tensor], Tensor], tmp_path: Path) -> None:
    trained, inputs, outputs = case
    module = torch.jit.load(str(trained.export(tmp_path / "out.pt")))
    torch.testing.assert_close(module(*inputs).detach(), outputs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_onnx_answers_as_the_model(case: tuple[Run, list[Tensor], Tensor], tmp_path: Path) -> None:
    from onnx.reference import ReferenceEvaluator

    trained, inputs, outputs = case
    program = ReferenceEvaluator(str(trained.export(tmp_path / "out.onnx")))
    if len(inputs) > 1:
        assert trained.federation.validation is not None
        assert isinstance(trained.federation.validation.inputs, dict)
        assert program.input_names == list(trained.federation.validation.inputs)
    fed = dict(zip(program.input_names, (value.numpy() for value in inputs), strict=True))
    np.testing.assert_allclose(program.run(None, fed)[0], outputs.numpy(), rtol=1e-4, atol=1e-5)


def test_tracing_sees_no_record(case: tuple[Run, list[Tensor], Tensor]) -> None:
    trained, inputs, _ = case
    traced = _no_records(trained.federation.train.inputs, 2)
    for made, real in zip(traced.values() if isinstance(traced, dict) else [traced], inputs, strict=True):
        assert (made.dtype, made.shape) == (real.dtype, (2, TOKENS))
        assert not made.any()


# Clients by name ---------------------------------------------------------------------------------------------------------


def sites(data: Dataset, named: bool = True, owned: bool = True) -> fedcdp.Federation:
    federation = fedcdp.partition(data, indices=[range(6), range(6, 10), range(10, 12)], validation=data)
    names = ("charite", "bonn", "ulm") if named else None
    return replace(federation, names=names, validation_clients=np.repeat([0, 1], [5, 7]) if owned else None)


ROWS = torch.linspace(-1, 1, 36).reshape(12, 3)
SCORES = Dataset(ROWS, ROWS.sum(1), task="regression")


def test_clients_with_names_are_listed_on_their_own_records() -> None:
    network = nn.Linear(3, 1)
    trained = made_run(network, sites(SCORES))
    with torch.no_grad():
        errors = (network(ROWS)[:, 0] - SCORES.targets).abs().numpy()
    result = trained.evaluate("validation", per_client=True)
    assert result["accuracy"] is None
    assert result["metrics"]["mae"] == pytest.approx(errors.mean())
    assert [(row["client"], row["examples"]) for row in result["clients"]] == [("charite", 5), ("bonn", 7)]
    own = [errors[:5].mean(), errors[5:].mean()]
    assert [row["mae"] for row in result["clients"]] == pytest.approx(own)
    assert result["per_client"]["max"] == pytest.approx(max(own))
    assert not trained.reads_training_records("validation", per_client=True)


def test_clients_with_names_are_listed_on_the_training_split() -> None:
    trained = made_run(nn.Linear(3, 1), sites(SCORES))
    rows = trained.evaluate("train", per_client=True)["clients"]
    assert [(row["client"], row["examples"]) for row in rows] == [("charite", 6), ("bonn", 4), ("ulm", 2)]
    assert trained.reads_training_records("train", per_client=True)


def test_without_own_validation_records_classes_are_weighted_by_name() -> None:
    data = Dataset(ROWS, torch.arange(12) % 3, 3)
    trained = made_run(nn.Linear(3, 3), sites(data, owned=False))
    result = trained.evaluate("validation", per_client=True)
    assert [row["client"] for row in result["clients"]] == ["charite", "bonn", "ulm"]
    assert trained.reads_training_records("validation", per_client=True)
    nameless = made_run(trained.model, sites(data, named=False, owned=False)).evaluate("validation", per_client=True)
    assert "clients" not in nameless
    assert nameless["per_client"] == result["per_client"]


def test_numbers_cannot_be_weighted_by_classes() -> None:
    with pytest.raises(RunError, match="the records of split validation are nobody's; split train shows each client's own"):
        made_run(nn.Linear(3, 1), sites(SCORES, owned=False)).evaluate("validation", per_client=True)
