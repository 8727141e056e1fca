"""The attack `tokens` on the text classifier of docs/tutorials/text.md, before any training.

    python -m benchmarks.text_attack --leak type0 --method fed-cdp --victims 100

Which of three libraries is a sentence from? The sentences are docstrings of NumPy, SciPy and scikit-learn, so the figures
depend on their versions. 100 clients hold 43 sentences each, and take one step on all of them; a type-2 reader sees single
sentences. σ and the clip bound are those of the tutorial, but for the options given.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import random
import re
import zlib
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import fedcdp
from fedcdp.attacks.leaks import finite

LIBRARIES = {
    "numpy": ". .fft .linalg .ma .polynomial .random",
    "scipy": ".cluster .fft .integrate .interpolate .linalg .ndimage .optimize .signal .sparse .spatial .special .stats",
    "sklearn": ".cluster .covariance .datasets .decomposition .ensemble .feature_extraction .feature_selection .impute"
    " .inspection .linear_model .manifold .metrics .mixture .model_selection .neighbors .preprocessing .svm .tree .utils",
}
_FOREIGN = re.compile(r"(?i)numpy|scipy|sklearn|scikit|\bnp\b|[<>={}_`]|\n-")  # names a library, or is code
_TRAINED = 4300


class Reader(nn.Module):
    """An embedding, one layer of a transformer, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1024, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 3)
        nn.init.normal_(self.words.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the three libraries."""
        read = self.layer(self.words(ids), src_key_padding_mask=ids == 0) * (ids != 0).unsqueeze(2)
        scores: Tensor = self.head(read.sum(dim=1) / (ids != 0).sum(dim=1, keepdim=True).clamp(min=1))
        return scores


@cache
def sentences() -> fedcdp.Dataset:
    """Token ids [5400, 24] of as many sentences of each library, and the library."""
    found: dict[tuple[str, ...], set[str]] = {}
    for library, modules in LIBRARIES.items():
        for module in (importlib.import_module(f"{library}{name}".rstrip(".")) for name in modules.split()):
            things = (getattr(module, name) for name in dir(module) if not name.startswith("_"))
            for text in (inspect.getdoc(thing) or "" for thing in things if callable(thing)):
                for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])|\n\s*\n", text):
                    words = tuple(re.findall("[a-z]+", sentence.lower()))
                    if 6 <= len(words) <= 32 and not _FOREIGN.search(sentence):
                        found.setdefault(words, set()).add(library)
    rows = []
    for label, library in enumerate(LIBRARIES):
        own = sorted(words for words, libraries in found.items() if libraries == {library})
        rows += [(words, label) for words in random.Random(0).sample(own, 1800)]  # noqa: S311  # nosec B311
    random.Random(0).shuffle(rows)  # noqa: S311  # nosec B311
    tokens = torch.zeros(len(rows), 24, dtype=torch.int64)
    for row, (words, _) in zip(tokens, rows, strict=True):
        row[: len(words)] = torch.tensor([1 + zlib.crc32(word.encode()) % 1023 for word in words[:24]])
    return fedcdp.Dataset(tokens, torch.tensor([label for _, label in rows]), classes=3)


def attacked(leak: str, victims: int | None, device: str, **plan: Any) -> dict[str, Any]:
    """The summary of the attack on 100 clients of one method; under a secure sum, on four."""
    data = sentences()
    train, public = data.take(torch.arange(_TRAINED)), data.take(torch.arange(_TRAINED, len(data)))
    clients = 4 if plan.get("secure_aggregation") else 100
    federation = fedcdp.partition(train, clients=clients, records=43, scheme="iid", validation=public)
    torch.manual_seed(0)
    usual: dict[str, Any] = {"rounds": 80, "per_round": clients, "local_steps": 1, "batch_size": 43, "clip": 1.0,
                             "clip_mode": "flat", "record_sampling": "partition", "learning_rate": 1.0}  # fmt: skip
    chosen = fedcdp.Plan(**(usual | plan))
    leaks = fedcdp.attack(
        chosen, model=Reader(), federation=federation, leak=leak, attack="tokens", victims=victims, device=device
    )
    summary: dict[str, Any] = finite(leaks.summary())
    return summary


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--leak", default="type2")
    words.add_argument("--method", default="fed-cdp")
    words.add_argument("--noise-at", default=None)
    words.add_argument("--noise-multiplier", type=float, default=None)
    words.add_argument("--noise", default=None)
    words.add_argument("--secure-aggregation", action="store_true", default=None)
    words.add_argument("--victims", type=int, default=None, help="default: up to 100; one sum")
    words.add_argument("--device", default="cpu")
    words.add_argument("--json", action="store_true", help="ignored: the summary is always JSON")
    return words


def main(words: list[str] | None = None) -> None:
    """Print the summary."""
    given = {name: value for name, value in vars(parser().parse_args(words)).items() if value is not None}
    given.pop("json")
    print(json.dumps(attacked(given.pop("leak"), given.pop("victims", None), given.pop("device"), **given)))


if __name__ == "__main__":
    main()
