"""Networks of the shapes of GPT-2 small, BERT base and ResNet-18, of torch's own modules, with few trained layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LowRank(nn.Module):
    """A frozen dense layer with two trained factors beside it (LoRA)."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.base(tokens) + self.up(self.down(tokens))


class Adapter(nn.Module):
    """A trained bottleneck with a way around it (Houlsby et al. 2019)."""

    def __init__(self, width: int, bottleneck: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, bottleneck), nn.Linear(bottleneck, width)
        nn.init.zeros_(self.up.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.up(F.gelu(self.down(tokens)))


class Block(nn.Module):
    """A layer of a transformer: LoRA on its queries, keys and values (`rank`), or adapters behind both parts."""

    def __init__(self, width: int, heads: int, *, rank: int = 0, bottleneck: int = 0, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        frozen = [nn.LayerNorm(width), nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, 4 * width)]
        self.first, self.out, self.second, self.wide = (each.requires_grad_(False) for each in frozen)
        self.narrow = nn.Linear(4 * width, width).requires_grad_(False)
        self.products = LowRank(width, 3 * width, rank) if rank else nn.Linear(width, 3 * width).requires_grad_(False)
        self.adapters = nn.ModuleList(Adapter(width, bottleneck) for _ in range(2 if bottleneck else 0))

    def forward(self, tokens: Tensor) -> Tensor:
        queries, keys, values = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.products(self.first(tokens)).chunk(3, -1)
        )
        read = F.scaled_dot_product_attention(queries, keys, values, is_causal=self.causal).transpose(1, 2).flatten(2)
        tokens = tokens + self._adapted(0, self.out(read))
        return tokens + self._adapted(1, self.narrow(F.gelu(self.wide(self.second(tokens)))))

    def _adapted(self, place: int, values: Tensor) -> Tensor:
        return self.adapters[place](values) if self.adapters else values


class Transformer(nn.Module):
    """Blocks between frozen embeddings and a head: a classifier, or with `classes=None` a language model."""

    def __init__(
        self, layers: int, width: int, heads: int, words: int, tokens: int, *, rank: int = 0, bottleneck: int = 0,
        classes: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.words = nn.Embedding(words, width).requires_grad_(False)
        self.register_buffer("places", 0.02 * torch.randn(tokens, width))
        causal = classes is None
        self.blocks = nn.Sequential(
            *(Block(width, heads, rank=rank, bottleneck=bottleneck, causal=causal) for _ in range(layers))
        )
        self.head = nn.Linear(width, words if classes is None else classes, bias=classes is not None)
        self.head.requires_grad_(classes is not None)
        self.mean = classes is not None

    def forward(self, numbers: Tensor) -> Tensor:
        tokens = self.blocks(self.words(numbers) + self.places)
        return self.head(tokens.mean(1) if self.mean else tokens)


class Residual(nn.Module):
    """Two convolutions with group norms, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(min(32, outputs // 2), outputs) for _ in range(2))
        same = stride == 1 and inputs == outputs
        self.around = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(self.norms[0](self.first(images)))
        return F.relu(self.norms[1](self.second(hidden)) + self.around(images))


def resnet18(width: int = 64, classes: int = 10) -> nn.Module:
    """ResNet-18 for small colour images, with GroupNorm."""
    widths = [width, 2 * width, 4 * width, 8 * width]
    blocks: list[nn.Module] = []
    before = width
    for number, each in enumerate(widths):
        blocks += [Residual(before, each, 1 if number == 0 else 2), Residual(each, each, 1)]
        before = each
    first = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.GroupNorm(min(32, width // 2), width), nn.ReLU()]
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


def next_words(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of a language model: every word from those before it."""
    return F.cross_entropy(outputs[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
