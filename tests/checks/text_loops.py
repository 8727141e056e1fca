"""A network for inputs by name, as Hugging Face's models are, and DP-SGD for it: honest, or broken."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

WORDS, LENGTH, COUNT = 11, 5, 4
Tokens = dict[str, Tensor]


class Classifier(nn.Module):
    """The mean of the words that a mask shows, with real-valued extras beside it, and a linear layer."""

    def __init__(self, extras: int = 0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4)
        self.head = nn.Linear(4 + extras, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, extras: Tensor | None = None) -> SimpleNamespace:
        shown = attention_mask[..., None].float()
        mean = (self.words(input_ids) * shown).sum(1) / shown.sum(1)
        return SimpleNamespace(logits=self.head(mean if extras is None else torch.cat([mean, extras], 1)))


def classifier(extras: int = 0) -> nn.Module:
    torch.manual_seed(0)
    return Classifier(extras)


def texts(extras: int = 0) -> tuple[Tokens, Tensor]:
    """Token ids from 2 on, a mask, and perhaps real numbers."""
    generator = torch.Generator().manual_seed(1)
    inputs = {
        "input_ids": torch.randint(2, WORDS, (COUNT, LENGTH), generator=generator),
        "attention_mask": (torch.arange(LENGTH) < torch.tensor([5, 3, 4, 2])[:, None]).long(),
    }
    real = {"extras": torch.randn(COUNT, extras, generator=generator)} if extras else {}
    return inputs | real, torch.arange(COUNT) % 3


def gradients(model: nn.Module, inputs: Tokens, labels: Tensor) -> dict[str, Tensor]:
    """The gradients of the cross-entropy of each record, in closed form."""
    assert isinstance(model, Classifier)
    with torch.no_grad():
        errors = model(**inputs).logits.softmax(-1) - nn.functional.one_hot(labels, 3)
        share = inputs["attention_mask"] / inputs["attention_mask"].sum(1, keepdim=True)
        mean = (model.words(inputs["input_ids"]) * share[..., None]).sum(1)
        features = torch.cat([mean, inputs["extras"]], 1) if "extras" in inputs else mean
        places = nn.functional.one_hot(inputs["input_ids"], WORDS) * share[..., None]
        words = places.sum(1)[:, :, None] * (errors @ model.head.weight[:, :4])[:, None, :]
    return {"words.weight": words, "head.weight": errors[:, :, None] * features[:, None, :], "head.bias": errors}


def dp_sgd(sigma: float = 1.0, clip: float | None = 1.0, *, silent: tuple[str, ...] = ()) -> Callable[..., dict[str, Any]]:
    """DP-SGD on a batch of dictionaries: clip each record's gradient, add σC to the sum, divide by a constant."""

    def leaves(model: nn.Module, inputs: Tokens, labels: Tensor) -> dict[str, Any]:
        each = gradients(model, inputs, labels)
        norms = torch.cat([value.flatten(1) for value in each.values()], 1).norm(dim=1)
        factor = torch.ones_like(norms) if clip is None else (clip / norms).clamp(max=1.0)
        sums = {name: torch.einsum("n,n...->...", factor, value) for name, value in each.items()}
        scale = sigma * (1.0 if clip is None else clip)
        return {
            name: (value + (0 if name in silent else scale) * torch.randn_like(value)) / COUNT
            for name, value in sums.items()
        }

    return leaves
