"""LoRA by the real `peft`, on a transformer of the real `transformers` with random weights (make integrations)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedcdp
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.files.tree import Layout, tensors_in
from fedcdp.models.networks import outputs_of
from fedcdp.training.saved_run import Trained
from tests.support.own_models import CLASSES, VOCABULARY, texts

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
PLAN = fedcdp.Plan(
    rounds=80, per_round=3, local_steps=1, batch_size=30, slots=60, clip=1, clip_mode="flat", noise_multiplier=0.05,
    learning_rate=3,
)  # fmt: skip


def tokens(count: int) -> Dataset:
    ids, mask, targets = texts(count)
    return Dataset({"input_ids": ids, "attention_mask": mask}, targets, CLASSES)


class Classifier(nn.Module):
    """A network of transformers behind a mask of zeros and −10⁹.

    Given a mask of zeros and ones, transformers asks whether it is all ones, and a value must not decide under `vmap`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        added = (attention_mask == 0)[:, None, None].float() * -1e9
        return self.model(input_ids=input_ids, attention_mask=added).logits


def base() -> Any:
    """A small BERT in evaluation mode, as `from_pretrained` returns one."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, num_labels=CLASSES,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.BertForSequenceClassification(config).eval()


def adapted() -> nn.Module:
    """The same with LoRA on queries and values."""
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=16, lora_dropout=0.1, target_modules=["query", "value"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Classifier(peft.get_peft_model(base(), lora)).eval()


@pytest.fixture(scope="module")
def run() -> Any:
    federation = fedcdp.partition(tokens(300), clients=3, scheme="iid", validation=tokens(90))
    return fedcdp.simulate(adapted(), federation, PLAN, evaluate_every=80)


def test_each_factor_and_the_head_are_a_group() -> None:
    layers = Layout.of(adapted()).layers
    factors = [names for names in layers if len(names) == 1 and ".lora_" in names[0]]
    assert len(factors) == 2 * 2 * 2  # A and B of query and value in two layers
    assert [names for names in layers if names not in factors] == [
        tuple(f"model.base_model.model.classifier.modules_to_save.default.{each}" for each in ("weight", "bias"))
    ]
    plan, federation = PLAN.but(clip_mode="layer"), fedcdp.partition(tokens(300), clients=3, scheme="iid")
    epsilons = [each.privacy(federation, model=adapted()).row("server").epsilon for each in (PLAN, plan)]
    assert epsilons[0] < epsilons[1]  # √9 times the sensitivity


def test_it_learns_privately_and_is_accounted(run: Any) -> None:
    before, after = dict(adapted().named_parameters()), dict(run.model.named_parameters())
    for name, value in before.items():
        assert torch.equal(value, after[name]) is not value.requires_grad
    assert run.accuracy > 0.5  # a guess: a third
    assert run.privacy().row("server").epsilon_used > 0


def test_it_is_attacked(run: Any) -> None:
    assert fedcdp.attack(run, leak="type2", victims=2).summary()["victims"] == 2


def test_its_adapter_is_read_back_by_peft(run: Any, tmp_path: Path) -> None:
    run.model.model.save_pretrained(tmp_path)
    again = Classifier(peft.PeftModel.from_pretrained(base(), tmp_path)).eval()
    inputs = tokens(9).inputs
    with torch.no_grad():
        torch.testing.assert_close(outputs_of(again, inputs), outputs_of(run.model.eval(), inputs))


@pytest.mark.filterwarnings("ignore")
def test_it_is_exported_and_evaluated(run: Any, tmp_path: Path) -> None:
    from onnx.reference import ReferenceEvaluator

    data = tokens(7)
    trained = Trained(None, None, Splits("made up", data, data, None, ""), run.model.eval())  # type: ignore[arg-type]
    assert 0 <= trained.evaluate("validation")["accuracy"] <= 1
    program = ReferenceEvaluator(str(trained.export("onnx", tmp_path / "model.onnx")))
    given = dict(zip(program.input_names, (value.numpy() for value in tensors_in(data.inputs)), strict=True))
    with torch.no_grad():
        expected = outputs_of(run.model, data.inputs).numpy()
    np.testing.assert_allclose(program.run(None, given)[0], expected, rtol=1e-4, atol=1e-5)
