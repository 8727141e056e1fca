"""The page about a check: self-contained, escaped, complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedcdp
from fedcdp.checks import FlowerSettings, OpacusSettings
from fedcdp.report.check_page import render_check
from tests.checks.loops import dp_sgd, examples, network

HOSTILE = "<script>alert(1)</script>"


def test_every_row_and_finding_is_on_the_page() -> None:
    found = fedcdp.check(FlowerSettings("server-fixed", 1.0, 100, 10, 5))
    page = render_check(found)
    assert found.privacy is not None
    for text in (*(row.assumption for row in found.privacy.rows), *(scope.reads for scope in found.scopes)):
        assert text.replace("'", "&#39;") in page
    assert page.count('<th scope="row">server</th>') == 3  # two units, and the attacks


def test_a_vacuous_epsilon_is_called_so() -> None:
    found = fedcdp.check(OpacusSettings(0.5, 1.0, 1000))
    assert "(vacuous)" in render_check(found)


def test_the_page_of_a_function_shows_its_tensors_and_escapes_their_names() -> None:
    def leaves(model: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return dp_sgd(silent=("bias",))(model, inputs, labels) | {HOSTILE: inputs.sum()}

    found = fedcdp.check(leaves, model=network(), examples=examples(), epsilon=1.0, trials=100)
    page = render_check(found)
    assert "The claim does not hold." in page
    assert '<span class="badge leaks">without noise</span>' in page
    assert HOSTILE not in page
    assert "&lt;script&gt;" in page


def test_the_page_loads_and_runs_nothing() -> None:
    page = render_check(fedcdp.check(OpacusSettings(1.0, 0.1, 10)))
    assert "default-src 'none'" in page
    assert not re.findall(r"<script|https?://|url\(", page)


def test_no_record_is_on_the_page() -> None:
    inputs = torch.full((4, 6), 0.123456) + torch.arange(4)[:, None]
    found = fedcdp.check(
        lambda _model, inputs, _labels: inputs.mean(0), model=network(), examples=(inputs, torch.arange(4) % 3), trials=100
    )
    assert "123456" not in render_check(found)


def test_a_page_replaces_a_page_and_nothing_else(tmp_path: Path) -> None:
    found = fedcdp.check(OpacusSettings(1.0, 0.1, 10))
    page = tmp_path / "check.html"
    assert fedcdp.report(found, page) == fedcdp.report(found, page) == page
    other = tmp_path / "notes.html"
    other.write_text("mine")
    with pytest.raises(fedcdp.RunError, match="not a page of this program"):
        fedcdp.report(found, other)
    assert other.read_text() == "mine"
