"""Counts of failures: they outlast their process, and a damaged file is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedcdp.deploy.protocol.failures import Failures
from fedcdp.errors import RunError


def test_counts_are_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "failures.json"
    counted = Failures(path)
    for client in (3, 1, 3):
        counted.add(client)
        assert Failures(path).too_many() == counted.too_many()
    assert Failures(path).too_many() == {3}
    Failures(path).add(1)
    assert Failures(path).too_many() == {1, 3}


def test_without_a_path_they_are_in_memory() -> None:
    counted = Failures()
    counted.add(0)
    counted.add(0)
    assert counted.too_many() == {0}


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"failures": 3}', '{"failures": {"a": 1}}', '{"failures": {"-1": 1}}', '{"failures": {"1": true}}',
     '{"failures": {"1": 0}}', '{"failures": {"1": 1.5}}', '{"failures": {"1": 1, "01": 1}}'],
)  # fmt: skip
def test_a_damaged_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "failures.json").write_text(text)
    with pytest.raises(RunError, match="damaged"):
        Failures(tmp_path / "failures.json")
