"""Language models: the loss of tokens, those that are not predicted, perplexity, and runs from training to export."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcdp
from fedcdp.data.tasks import IGNORED, next_tokens
from fedcdp.engine import Batch, FunctionalEngine
from fedcdp.engine.recorded import RecordedEngine
from fedcdp.errors import DataError
from fedcdp.training import token_metrics
from fedcdp.training.token_metrics import TokenCounts, most_frequent_token
from tests.engine.test_recorded import own_weights, same

WORDS, TOKENS, WIDTH = 20, 6, 8


class Speaker(nn.Module):
    """A causal transformer whose embedding is also its last layer, with an adapter that starts as zero."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(0.1 * torch.randn(TOKENS, WIDTH))
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0, batch_first=True, norm_first=True)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)
        self.register_buffer("later", torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1))

    def forward(self, numbers: Tensor) -> Tensor:
        read = self.layer(self.words(numbers) + self.places, src_mask=self.later)
        return (read + self.up(self.down(read))) @ self.words.weight.T


def sequences(count: int) -> fedcdp.Dataset:
    """Every second token repeats the one before it; sequences end in padding, and the first one is all padding."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(1, WORDS, (count, TOKENS), generator=generator)
    numbers[:, 1::2] = numbers[:, ::2]
    targets = numbers.masked_fill(torch.arange(TOKENS) >= 4 + torch.arange(count)[:, None] % 3, IGNORED)
    targets[0] = IGNORED
    return fedcdp.Dataset(numbers, targets, task="language")


def test_the_loss_counts_every_sequence_once_and_leaves_padding_out() -> None:
    outputs, targets = torch.randn(3, TOKENS, WORDS), sequences(3).targets
    alone = [
        float(F.cross_entropy(one[:-1], true[1:], ignore_index=IGNORED)) for one, true in zip(outputs, targets, strict=True)
    ]
    assert math.isnan(alone[0])
    assert float(next_tokens(outputs, targets)) == pytest.approx((0 + alone[1] + alone[2]) / 3)


def test_both_engines_give_the_gradients_of_sequences_with_padding() -> None:
    torch.manual_seed(2)
    model, data = Speaker(), sequences(8)
    batch = Batch(data.tensor.view(2, 4, TOKENS), data.targets.view(2, 4, TOKENS), torch.ones(2, 4, dtype=torch.bool))
    weights = own_weights(model)
    engine, reference = RecordedEngine(model, next_tokens, data.tensor[:1]), FunctionalEngine(model, next_tokens)
    wanted = reference.per_example_gradients(weights, batch)
    same(engine.per_example_gradients(weights, batch), wanted)
    assert not any(bool(value[0, 0].any()) for value in wanted.values())  # nothing is predicted in the first sequence
    for mode in ("layer", "flat"):
        groups = reference.layout.groups(mode)
        same(engine.clipped_sum(weights, batch, groups, 0.3), reference.clipped_sum(weights, batch, groups, 0.3))


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (torch.zeros(3, 4), "at least two int64 token ids"),
        (torch.zeros(3, 1, dtype=torch.int64), "at least two int64 token ids"),
        (torch.full((3, 4), -1), "only -100 is allowed"),
    ],
)
def test_targets_that_are_no_tokens_are_refused(targets: Tensor, said: str) -> None:
    with pytest.raises(DataError, match=said):
        fedcdp.Dataset(torch.zeros(3, 4, dtype=torch.int64), targets, task="language")


def test_perplexity_and_accuracy_are_those_of_all_tokens_together(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    data = sequences(7)
    outputs = torch.randn(7, TOKENS, WORDS)
    scores, true = outputs[:, :-1].flatten(0, 1), data.targets[:, 1:].flatten()
    kept = true != IGNORED
    whole = TokenCounts.of(outputs, data.targets)
    monkeypatch.setattr(token_metrics, "_VALUES", 2 * outputs[0].numel())  # two sequences at once
    for counts in (whole, TokenCounts.of(outputs, data.targets)):
        found = counts.figures()
        assert counts.tokens == int(kept.sum())
        assert found["accuracy"] == pytest.approx(float((scores.argmax(1) == true)[kept].double().mean()))
        assert found["perplexity"] == pytest.approx(math.exp(float(F.cross_entropy(scores[kept], true[kept]))), rel=1e-5)
    assert TokenCounts().figures() == {"accuracy": None, "perplexity": None}
    assert most_frequent_token(torch.tensor([[9, 1, 2, 2], [9, 2, 3, IGNORED]])) == pytest.approx(3 / 5)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(4)
    federation = fedcdp.partition(sequences(200), clients=4, scheme="iid", validation=sequences(60))
    plan = fedcdp.Plan(
        rounds=30, per_round=4, local_steps=1, batch_size=25, clip=1, clip_mode="flat", noise_multiplier=0.1,
        learning_rate=2, noise="batch",
    )  # fmt: skip
    out = tmp_path_factory.mktemp("language") / "run"
    return fedcdp.simulate(Speaker(), federation, plan, engine="recorded", evaluate_every=30, out=out)


def test_a_language_model_is_trained_evaluated_attacked_and_reported(run: Any, tmp_path: Path) -> None:
    assert run.engine == "recorded"
    assert run.scores["perplexity"] < WORDS / 1.3
    assert run.evaluate("validation") == {
        "split": "validation", "examples": 60, "accuracy": pytest.approx(run.accuracy),
        "metrics": {name: pytest.approx(run.scores[name]) for name in ("perplexity", "loss")},
    }  # fmt: skip
    assert run.warning is None
    assert fedcdp.attack(run, leak="type2", victims=2, attack="tokens").summary()["victims"] == 2
    with pytest.raises(DataError, match="which the attack tokens infers"):
        fedcdp.attack(run, leak="type2", attack="labels", victims=2)
    fedcdp.report(run, tmp_path / "report.html")
    assert "Perplexity" in (tmp_path / "report.html").read_text()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_transformer_is_exported_as_a_program(run: Any, tmp_path: Path) -> None:
    program = torch.jit.load(run.export(tmp_path / "model.pt"))  # type: ignore[no-untyped-call]
    numbers = sequences(5).tensor
    with torch.no_grad():
        torch.testing.assert_close(program(numbers[:1]), run.model.eval()(numbers[:1]), rtol=1e-4, atol=1e-5)


def test_an_adapter_that_did_not_change_is_named(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(5)
    model = Speaker().requires_grad_(False)
    for each in (model.down, model.up):
        each.requires_grad_(True)
        nn.init.zeros_(each.weight)  # neither factor has a gradient
    federation = fedcdp.partition(sequences(20), clients=2, scheme="iid")
    plan = fedcdp.Plan(method="nonprivate", rounds=2, per_round=2, local_steps=1, batch_size=5, learning_rate=1)
    fedcdp.simulate(model, federation, plan)
    assert "down.weight, up.weight did not change in 2 rounds" in caplog.text
    caplog.clear()
    nn.init.ones_(model.down.weight)
    fedcdp.simulate(model, federation, plan.but(rounds=3))
    assert "did not change" not in caplog.text
