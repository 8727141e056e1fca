"""Downloading an original file: https only, mirrors in turn, accepted only with its published checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO

from fedcdp.errors import DataError
from fedcdp.files import atomic_write

TIMEOUT_SECONDS = 30
CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class Remote:
    """An original file on the network: the mirrors that hold it, and the checksum that makes a copy acceptable."""

    name: str
    urls: tuple[str, ...]
    algorithm: str
    checksum: str


def fetch(remote: Remote, folder: Path, *, quiet: bool = False) -> Path:
    """Download `remote` into `folder` from the first mirror that delivers it.

    Guarantees: the file appears under its name only whole and with the right checksum; a failed attempt leaves
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
    """Open `url` for reading; anything but https is refused, also where a redirect leads."""
    from urllib import request

    opener = request.OpenerDirector()
    # Only https handlers: an opener of the usual kind would follow a redirect to http or ftp.
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
            raise DataError(f"{remote.algorithm} is {digest.hexdigest()} instead of {remote.checksum}")


@contextmanager
def _progress(name: str, source: IO[bytes], quiet: bool) -> Iterator[Callable[[int], None]]:
    if quiet:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    # On standard error, so that a command's output stays clean.
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        headers = getattr(source, "headers", None) or {}
        length = headers.get("Content-Length", "")
        task = bar.add_task(name, total=int(length) if length.isdigit() else None)
        yield lambda count: bar.advance(task, count)
