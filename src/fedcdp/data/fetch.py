"""Locating the files of a dataset: the data directory, then the cache, then the network.

Downloads use https only, try mirrors in turn, and are accepted only with the published checksum.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO

from fedcdp.errors import DataError
from fedcdp.files.disk import atomic_write, user_cache
from fedcdp.files.untrusted import read_bounded


@dataclass(frozen=True)
class Storage:
    """The directories to search, in order: DIR/<dataset>/, DIR/, then the cache's <dataset>/, where downloads go."""

    data_dir: Path | None
    cache: Path
    download: bool = True
    quiet: bool = False

    @classmethod
    def choose(cls, data_dir: Path | str | None, *, download: bool, quiet: bool) -> Storage:
        """Search `data_dir`, else FEDCDP_DATA; cache in FEDCDP_CACHE, else XDG_CACHE_HOME/fedcdp, else ~/.cache/fedcdp."""
        chosen = data_dir if data_dir is not None else os.environ.get("FEDCDP_DATA") or None
        return cls(Path(chosen).expanduser() if chosen is not None else None, user_cache(), download, quiet)

    def folder(self, dataset: str) -> Path:
        """The cache folder of `dataset`; it may not exist yet."""
        return self.cache / dataset

    def places(self, dataset: str) -> list[Path]:
        """The folders searched for `dataset`, first to last. A data directory that does not exist is an error."""
        own = []
        if self.data_dir is not None:
            # A mistyped directory should not silently start a download.
            if not self.data_dir.is_dir():
                raise DataError(f"the data directory {self.data_dir} does not exist")
            own = [self.data_dir / dataset, self.data_dir]
        return [*own, self.folder(dataset)]

    def find(self, dataset: str, *names: str) -> Path | None:
        """The first existing file with any of `names`, or None."""
        candidates = (place / name for place in self.places(dataset) for name in names)
        return next((path for path in candidates if path.is_file()), None)

    def obtain(self, dataset: str, *names: str, remote: Remote) -> Path:
        """The first existing file with any of `names`; else `remote`, downloaded into the cache."""
        found = self.find(dataset, *names)
        if found is not None:
            return found
        if not self.download:
            raise self.missing(dataset, *names, reason="downloading is switched off")
        try:
            return fetch(remote, self.folder(dataset), quiet=self.quiet)
        except DataError as error:
            raise self.missing(dataset, *names, reason=str(error)) from error

    def missing(self, dataset: str, *names: str, reason: str) -> DataError:
        """The error for a file that was not found: its names, the directories searched, and why it was not downloaded."""
        places = ", ".join(str(place) for place in self.places(dataset))
        one_line = " ".join(reason.split())
        return DataError(f"{dataset} needs {' or '.join(names)} in one of {places}: not found, and {one_line}")


def read_unpacked(path: Path, most: int) -> bytes:
    """The contents of `path`, decompressed if they are gzip (by content, not by name); refused beyond `most` bytes."""
    try:
        content = read_bounded(path, most)
        if not content.startswith(b"\x1f\x8b"):
            return content
        with gzip.open(io.BytesIO(content)) as packed:
            unpacked = packed.read(most + 1)
        if len(unpacked) > most:
            raise DataError(f"{path} unpacks to more than {most:,} bytes, too large for this file")
        return unpacked
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read; it is damaged or truncated ({error})") from error


TIMEOUT_SECONDS = 30
CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class Remote:
    """An original file on the network: its mirrors, and the checksum that a download must have."""

    name: str
    urls: tuple[str, ...]
    algorithm: str
    checksum: str


def fetch(remote: Remote, folder: Path, *, quiet: bool = False) -> Path:
    """Download `remote` into `folder` from the first mirror that delivers it.

    Guarantees: the file appears under its name only when complete and with the right checksum; a failed attempt leaves
    nothing behind. Raises `DataError` with each mirror's failure.
    """
    failures = []
    for url in remote.urls:
        try:
            _fetch_from(url, remote, folder / remote.name, quiet=quiet)
        except (OSError, HTTPException, DataError) as error:
            failures.append(f"{url}: {error}")
        else:
            return folder / remote.name
    raise DataError(f"{remote.name} could not be downloaded ({'; '.join(failures)})")


def open_https(url: str) -> IO[bytes]:
    """Open `url` for reading; anything but https is refused, including redirects."""
    from urllib import request

    opener = request.OpenerDirector()
    # Only https handlers: the default opener would follow a redirect to http or ftp.
    for handler in (
        request.ProxyHandler(),
        request.HTTPSHandler(),
        request.HTTPRedirectHandler(),
        request.HTTPErrorProcessor(),
        request.HTTPDefaultErrorHandler(),
        request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    response: IO[bytes] = opener.open(url, timeout=TIMEOUT_SECONDS)
    return response


def _fetch_from(url: str, remote: Remote, target: Path, *, quiet: bool) -> None:
    digest = hashlib.new(remote.algorithm, usedforsecurity=False)
    with open_https(url) as source, atomic_write(target) as sink, _progress(remote.name, source, quiet) as advance:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
            sink.write(chunk)
            advance(len(chunk))
        if digest.hexdigest() != remote.checksum:
            raise DataError(f"its {remote.algorithm} checksum is {digest.hexdigest()} instead of {remote.checksum}")


@contextmanager
def _progress(name: str, source: IO[bytes], quiet: bool) -> Iterator[Callable[[int], None]]:
    if quiet:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    # On standard error, to keep a command's output clean.
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        headers = getattr(source, "headers", None) or {}
        length = headers.get("Content-Length", "")
        task = bar.add_task(name, total=int(length) if length.isdigit() else None)
        yield lambda count: bar.advance(task, count)
