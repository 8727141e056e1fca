"""Where a dataset's files are found: the data directory, then the cache, then the network."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from fedcdp.data.download import Remote, fetch
from fedcdp.errors import DataError
from fedcdp.files import user_cache
from fedcdp.untrusted import read_bounded


@dataclass(frozen=True)
class Storage:
    """The places to look in, in order: DIR/<dataset>/, DIR/, then the cache's <dataset>/, where downloads go."""

    data_dir: Path | None
    cache: Path
    download: bool = True
    quiet: bool = False

    @classmethod
    def choose(cls, data_dir: Path | str | None, *, download: bool, quiet: bool) -> Storage:
        """`data_dir`, else FEDCDP_DATA; as cache FEDCDP_CACHE, else XDG_CACHE_HOME/fedcdp, else ~/.cache/fedcdp."""
        chosen = data_dir if data_dir is not None else os.environ.get("FEDCDP_DATA") or None
        return cls(Path(chosen).expanduser() if chosen is not None else None, user_cache(), download, quiet)

    def folder(self, dataset: str) -> Path:
        """The cache's folder of `dataset`; it may not exist yet."""
        return self.cache / dataset

    def places(self, dataset: str) -> list[Path]:
        """The folders searched for `dataset`, first to last. A data directory that does not exist is an error."""
        own = []
        if self.data_dir is not None:
            # A mistyped directory should not start a download in silence.
            if not self.data_dir.is_dir():
                raise DataError(f"the data directory {self.data_dir} does not exist")
            own = [self.data_dir / dataset, self.data_dir]
        return [*own, self.folder(dataset)]

    def find(self, dataset: str, *names: str) -> Path | None:
        """The first file there is under any of `names`, or None."""
        candidates = (place / name for place in self.places(dataset) for name in names)
        return next((path for path in candidates if path.is_file()), None)

    def obtain(self, dataset: str, *names: str, remote: Remote) -> Path:
        """The first file there is under any of `names`; else `remote`, downloaded into the cache."""
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
        """The error of a file that is nowhere: what was looked for, where, and why it was not downloaded."""
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
            raise DataError(f"{path} unpacks to more than {most:,} bytes, which is more than it can hold")
        return unpacked
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read, it is damaged or cut short ({error})") from error
