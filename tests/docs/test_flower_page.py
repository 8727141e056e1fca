"""The Flower app of the page for people who come from Flower, run in this process."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flwr.app import Context, RecordDict

from tests.support import doc_pages
from tests.support.local_grid import LocalGrid, Node
from tools.pages import ROOT, source_of

PAGE = source_of(ROOT / "docs" / "tutorials" / "coming-from-flower.md")


@pytest.mark.slow
def test_the_flower_app_prints_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    monkeypatch.syspath_prepend(str(tmp_path))
    found = list(doc_pages.blocks(PAGE))
    for block in found:
        if block.mark == "file":
            (tmp_path / str(block.what)).write_text(block.code)
    import client_app
    import server_app

    for module in (client_app, server_app):
        monkeypatch.delitem(sys.modules, module.__name__)
    nodes = {
        100 + number: Node(client_app.client, {"partition-id": number, "num-partitions": 50}) for number in range(50)
    }  # fmt: skip
    context = Context(run_id=7, node_id=1, node_config={}, state=RecordDict(), run_config={})
    np.random.seed(0)  # noqa: NPY002  Flower's noise comes from this generator
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        server_app.server(LocalGrid(nodes), context)
    [shell] = [block for block in found if block.code == "flwr run .\n"]
    assert doc_pages.same(shell.printed or "", shown.getvalue()), shown.getvalue()
