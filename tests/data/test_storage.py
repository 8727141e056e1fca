from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from fedcdp.data.fetch import Remote, Storage, read_unpacked
from fedcdp.errors import DataError

REMOTE = Remote("file.gz", ("https://example.org/file.gz",), "sha256", "0" * 64)


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"content")
    return path


def test_the_data_directory_comes_before_the_cache(tmp_path: Path) -> None:
    storage = Storage(tmp_path / "data", tmp_path / "cached")
    places = [tmp_path / "data" / "set" / "file", tmp_path / "data" / "file", tmp_path / "cached" / "set" / "file"]
    for path in places:
        put(path)
    for path in places:
        assert storage.find("set", "other", "file") == path
        path.unlink()
    assert storage.find("set", "file") is None


def test_the_argument_comes_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCDP_DATA", str(tmp_path / "environment"))
    assert Storage.choose(None, download=True, quiet=True).data_dir == tmp_path / "environment"
    assert Storage.choose(str(tmp_path), download=True, quiet=True).data_dir == tmp_path


def test_the_cache_is_chosen_by_ours_then_the_desktops_then_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCDP_CACHE", str(tmp_path / "ours"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    chosen = []
    for name in ("FEDCDP_CACHE", "XDG_CACHE_HOME", "HOME"):
        chosen.append(Storage.choose(None, download=True, quiet=True).cache)
        monkeypatch.delenv(name)
    assert chosen == [tmp_path / "ours", tmp_path / "xdg" / "fedcdp", tmp_path / "home" / ".cache" / "fedcdp"]


@pytest.mark.parametrize(("download", "reason"), [(True, "the network is down"), (False, "switched off")])
def test_a_missing_file_is_one_line_saying_what_is_needed_and_where(tmp_path: Path, download: bool, reason: str) -> None:
    storage = Storage(tmp_path, tmp_path / "cached", download=download)
    with pytest.raises(DataError) as caught:
        storage.obtain("set", "file", "file.gz", remote=REMOTE)
    message = str(caught.value)
    assert message.startswith(
        f"set needs file or file.gz in one of {tmp_path / 'set'}, {tmp_path}, {tmp_path / 'cached' / 'set'}"
    )
    assert reason in message
    assert "\n" not in message


def test_a_data_directory_that_does_not_exist_is_an_error_rather_than_a_download(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the data directory .*mistyped does not exist"):
        Storage(tmp_path / "mistyped", tmp_path / "cached").find("set", "file")


def test_gzip_is_known_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "no-suffix"
    path.write_bytes(gzip.compress(b"content"))
    assert read_unpacked(path, 100) == b"content"
    path.write_bytes(b"content")
    assert read_unpacked(path, 100) == b"content"


@pytest.mark.parametrize("keep", [2, 12, -1])
def test_truncated_gzip_is_refused_by_name(tmp_path: Path, keep: int) -> None:
    path = put(tmp_path / "cut.gz")
    path.write_bytes(gzip.compress(bytes(range(256)))[:keep])
    with pytest.raises(DataError, match=r"cut\.gz cannot be read"):
        read_unpacked(path, 100)
