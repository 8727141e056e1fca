"""The recorded engine on networks of the real `transformers` and `peft`, with random weights (make integrations)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.engine import Batch, FunctionalEngine
from fedcdp.engine.recorded import RecordedEngine
from fedcdp.files.tree import each_tensor

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("error:There is a performance drop"),  # an operation that vmap runs one by one
]
WORDS, TOKENS, CLIENTS, EXAMPLES = 50, 10, 2, 3
SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0},
    "llama": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_key_value_heads": 1, "max_position_embeddings": 32},
    "opt": {"hidden_size": 16, "ffn_dim": 32, "word_embed_proj_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
            "max_position_embeddings": 32},
    "qwen3": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32},
    "bert": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
             "max_position_embeddings": 16, "num_labels": WORDS},
}  # fmt: skip


class Answering(nn.Module):
    """A network of transformers that answers with its logits."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, numbers: Tensor) -> Tensor:
        return self.model(input_ids=numbers, **self.options).logits


class Pictures(Answering):
    """A network of pictures, made of token ids."""

    def forward(self, numbers: Tensor) -> Tensor:
        waves = torch.arange(3 * 8 * 8).view(3, 8, 8) / WORDS
        return self.model(pixel_values=torch.sin(waves * (1 + numbers.float().mean(1))[:, None, None, None])).logits


def next_words(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of a language model: every word from those before it."""
    return F.cross_entropy(outputs[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def language_model(kind: str, **lora: Any) -> nn.Module:
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, vocab_size=WORDS, **SMALL[kind])
    )
    if lora:
        made = peft.get_peft_model(made, peft.LoraConfig(task_type="CAUSAL_LM", r=4, **lora))
    return Answering(made, use_cache=False).eval()


def classifier() -> nn.Module:
    torch.manual_seed(0)
    made = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=WORDS, **SMALL["bert"]))
    return Answering(made, attention_mask=torch.zeros(1, 1, 1, TOKENS)).eval()


def pictures() -> nn.Module:
    torch.manual_seed(0)
    sizes = SMALL["bert"] | {"image_size": 8, "patch_size": 4}
    sizes.pop("max_position_embeddings")
    return Pictures(transformers.ViTForImageClassification(transformers.ViTConfig(**sizes))).eval()


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "GPT-2": lambda: language_model("gpt2"),
    "GPT-2 with LoRA": lambda: language_model("gpt2", target_modules=["c_attn"], fan_in_fan_out=True),
    "Llama": lambda: language_model("llama"),
    "Llama with LoRA": lambda: language_model("llama", target_modules=["q_proj", "v_proj", "up_proj"]),
    "OPT": lambda: language_model("opt"),
    "Qwen 3": lambda: language_model("qwen3"),
    "BERT": classifier,
    "ViT": pictures,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_transformer_gives_what_the_reference_gives(name: str) -> None:
    model, generator = NETWORKS[name](), torch.Generator().manual_seed(1)
    numbers = torch.randint(WORDS, (CLIENTS, EXAMPLES, TOKENS), generator=generator)
    targets, loss = (numbers[..., 0], F.cross_entropy) if name in ("BERT", "ViT") else (numbers, next_words)
    batch = Batch(numbers, targets, torch.ones(CLIENTS, EXAMPLES, dtype=torch.bool))
    weights = {
        name: p.detach() + 0.05 * torch.randn(CLIENTS, *p.shape, generator=generator)
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    engine = RecordedEngine(model, loss, each_tensor(batch.inputs, lambda value: value[0, :1]))
    reference = FunctionalEngine(model, loss)
    wanted = reference.per_example_gradients(weights, batch)
    for name, value in engine.per_example_gradients(weights, batch).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-5)
        assert bool(value.any()), name  # every trained tensor really has a gradient
    groups = reference.layout.groups("layer")
    clipped = reference.clipped_sum(weights, batch, groups, 0.3)
    for name, value in engine.clipped_sum(weights, batch, groups, 0.3).items():
        torch.testing.assert_close(value, clipped[name], rtol=1e-5, atol=1e-5)
