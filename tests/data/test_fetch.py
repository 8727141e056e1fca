from __future__ import annotations

import hashlib
import urllib.request
from pathlib import Path
from typing import IO

import pytest

from fedcdp.data import fetch as fetching
from fedcdp.data.fetch import Remote, fetch
from fedcdp.errors import DataError
from fedcdp.files.disk import atomic_write

CONTENT = b"original " * 1000
open_https = fetching.open_https


@pytest.fixture(autouse=True)
def _file_urls_count_as_https(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001  (runs after `cache`)
    def open_file_url(url: str) -> IO[bytes]:
        assert url.startswith("file://")
        return urllib.request.urlopen(url)

    monkeypatch.setattr(fetching, "open_https", open_file_url)


def original(*mirrors: Path, content: bytes = CONTENT) -> Remote:
    urls = tuple((mirror / "original.bin").as_uri() for mirror in mirrors)
    return Remote("original.bin", urls, "sha256", hashlib.sha256(content).hexdigest())


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    folder = tmp_path / "mirror"
    folder.mkdir()
    (folder / "original.bin").write_bytes(CONTENT)
    return folder


@pytest.mark.parametrize("quiet", [True, False])
def test_a_download_is_kept_under_its_name(tmp_path: Path, mirror: Path, quiet: bool) -> None:
    path = fetch(original(mirror), tmp_path / "new" / "folder", quiet=quiet)
    assert path == tmp_path / "new" / "folder" / "original.bin"
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]


def test_a_quiet_download_prints_nothing(tmp_path: Path, mirror: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fetch(original(mirror), tmp_path / "folder", quiet=True)
    assert capfd.readouterr() == ("", "")


def test_a_wrong_checksum_leaves_nothing_behind(tmp_path: Path, mirror: Path) -> None:
    folder = tmp_path / "folder"
    with pytest.raises(DataError, match=r"its sha256 checksum is [0-9a-f]{64} instead of"):
        fetch(original(mirror, content=b"something else"), folder, quiet=True)
    assert list(folder.iterdir()) == []


def test_a_wrong_checksum_leaves_the_previous_file_alone(tmp_path: Path, mirror: Path) -> None:
    path = fetch(original(mirror), tmp_path / "folder", quiet=True)
    with pytest.raises(DataError):
        fetch(original(mirror, content=b"something else"), tmp_path / "folder", quiet=True)
    assert path.read_bytes() == CONTENT


def test_the_next_mirror_serves_where_one_is_down_or_wrong(tmp_path: Path, mirror: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    (wrong / "original.bin").write_bytes(b"tampered with")
    path = fetch(original(tmp_path / "down", wrong, mirror), tmp_path / "folder", quiet=True)
    assert path.read_bytes() == CONTENT


def test_every_failed_mirror_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"original\.bin could not be downloaded \(.*/one/.*; .*/two/.*\)"):
        fetch(original(tmp_path / "one", tmp_path / "two"), tmp_path / "folder", quiet=True)


@pytest.mark.parametrize("scheme", ["http", "ftp", "file"])
def test_only_https_is_opened(scheme: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=f"unknown url type: {scheme}"):
        open_https(f"{scheme}://localhost{tmp_path}")


def test_an_interrupted_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")

    def interrupted() -> None:
        with atomic_write(target) as file:
            file.write(b"half of the n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]
