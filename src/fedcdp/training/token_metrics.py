"""Perplexity and accuracy of language models, from counts that are added up batch by batch: outputs are never kept."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcdp.data.tasks import IGNORED

_VALUES = 2**22  # of outputs, in float64 at once
Counts = dict[str, float | None]


@dataclass(frozen=True)
class TokenCounts:
    """What a model says about the predicted tokens of some sequences."""

    tokens: int = 0
    surprise: float = 0.0
    """The negative logarithm of their probability."""
    right: int = 0
    """How many had the largest probability."""

    @staticmethod
    def of(outputs: Tensor, targets: Tensor) -> TokenCounts:
        """The counts for scores [sequences, tokens, words] and token ids [sequences, tokens]."""
        total = TokenCounts()
        for some in range(0, len(outputs), sequences_at_once(outputs)):
            at = slice(some, some + sequences_at_once(outputs))
            scores, words = outputs[at, :-1].flatten(0, 1), targets[at, 1:].flatten()
            told = words != IGNORED
            surprise = F.cross_entropy(scores[told].double(), words[told], reduction="sum")
            total += TokenCounts(int(told.sum()), float(surprise), int((scores[told].argmax(1) == words[told]).sum()))
        return total

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(self.tokens + other.tokens, self.surprise + other.surprise, self.right + other.right)

    def figures(self) -> Counts:
        """Accuracy and perplexity; None where no token is predicted, or a probability is zero."""
        if not self.tokens:
            return {"accuracy": None, "perplexity": None}
        mean = self.surprise / self.tokens
        return {
            "accuracy": self.right / self.tokens,
            "perplexity": math.exp(mean) if mean < math.log(torch.finfo(torch.float64).max) else None,
        }


def sequences_at_once(outputs: Tensor) -> int:
    """How many sequences are evaluated at once, from the outputs of at least one."""
    return max(1, _VALUES // max(1, outputs[0].numel()))


def most_frequent_token(targets: Tensor) -> float:
    """The accuracy of always predicting the most frequent token."""
    words = targets[:, 1:]
    words = words[words != IGNORED].cpu()
    return int(torch.bincount(words).max()) / len(words) if len(words) else 0.0
