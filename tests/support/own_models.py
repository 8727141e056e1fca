"""Networks that people bring: a frozen backbone with BatchNorm, a ResNet, readers of token ids, and LoRA by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY, TOKENS, CLASSES = 20, 6, 3
SIZE = 8
"""Pixels along an edge of an image."""


class Backbone(nn.Module):
    """Two convolutions with BatchNorm, whose statistics come from somewhere else than the training data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.again = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        for norm in (self.norm, self.again):
            nn.init.uniform_(norm.running_mean, -0.2, 0.2)  # type: ignore[arg-type]
            nn.init.uniform_(norm.running_var, 0.5, 2)  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(images)))
        return torch.relu(self.again(self.second(hidden)))


class FrozenCnn(nn.Module):
    """A trained head on a frozen backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.backbone = nn.Linear(8 * (SIZE // 2) ** 2, CLASSES), Backbone()
        self.backbone.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images).flatten(1))


class _Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.second, self.again = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, values: Tensor) -> Tensor:
        return self.relu(values + self.again(self.second(self.relu(self.norm(self.first(values))))))


class ResNet(nn.Module):
    """A stem, two residual blocks and a linear layer, with BatchNorm throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.blocks, self.head = nn.Sequential(_Block(8), _Block(8)), nn.Linear(8, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class Recurrent(nn.Module):
    """An embedding of token ids, any recurrent layer with the batch first, and a linear layer on its last output."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, **options: object) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 8)
        self.layer = kind(8, 5, batch_first=True, **options)  # type: ignore[call-arg]
        width = self.layer.proj_size or 5
        self.head = nn.Linear(width * (2 if self.layer.bidirectional else 1), CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.words(ids))[0][:, -1])


class Transformer(nn.Module):
    """PyTorch's own encoder at its defaults, on token ids with a mask of padding; the mean over what is no padding."""

    def __init__(self, batch_first: bool = True, **options: object) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first, **options)  # type: ignore[arg-type]
        self.words, self.batch_first = nn.Embedding(VOCABULARY, 8), batch_first
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first and not options.get("norm_first"))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        words = self.words(input_ids)
        values = words if self.batch_first else words.transpose(0, 1)
        values = self.encoder(values, src_key_padding_mask=attention_mask == 0)
        values = values if self.batch_first else values.transpose(0, 1)
        kept = attention_mask[..., None].to(values.dtype)
        return self.head((values * kept).sum(1) / kept.sum(1).clamp(min=1))


class Lora(nn.Module):
    """A frozen linear layer plus a trained product B·A, which is zero at first."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, values: Tensor) -> Tensor:
        return self.base(values) + values @ self.a.mT @ self.b.mT


class LoraMlp(nn.Module):
    """Two linear layers with LoRA and a trained head on flattened images."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Lora(nn.Linear(SIZE * SIZE, 12)), Lora(nn.Linear(12, 12))
        self.head = nn.Linear(12, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(images.flatten(1))))))


def images(count: int) -> tuple[Tensor, Tensor]:
    """Images of stripes in one of three directions, with noise, and their labels."""
    generator = torch.Generator().manual_seed(count)
    targets = torch.arange(count) % CLASSES
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    stripes = torch.stack([each % 4 < 2 for each in (rows, columns, rows + columns)]).float()
    return 0.8 * stripes[targets][:, None] + 0.2 * torch.rand(count, 1, SIZE, SIZE, generator=generator), targets


def texts(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids (0: padding), their masks, and labels: a third of the vocabulary is used more often under each."""
    generator = torch.Generator().manual_seed(count)
    targets = torch.arange(count) % CLASSES
    typical = 1 + targets[:, None] * 6 + torch.randint(6, (count, TOKENS), generator=generator)
    any_word = torch.randint(1, VOCABULARY, (count, TOKENS), generator=generator)
    ids = torch.where(torch.rand(count, TOKENS, generator=generator) < 0.8, typical, any_word)
    mask = (torch.arange(TOKENS) < 2 + torch.arange(count)[:, None] % (TOKENS - 1)).long()
    return ids * mask, mask, targets
