"""Journals: append-only files whose lines are on disk before what they record is used.

Guarantees:
- A line whose write has returned is in the file after any crash.
- A line carries its own digest and the digest of the line before it, so lines altered, inserted, reordered or dropped in the
  middle are detected. No secret is involved: this protects against accidents and naive tampering, not against someone who
  rewrites the whole file.
- A crash may leave bytes after the last newline. An incomplete line was never used; it is skipped, and removed before the
  next line is written. A complete line counts. Anything else that does not verify is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Self

from fedcdp.errors import RunError, StorageError
from fedcdp.files.disk import PRIVATE, not_written, sync_directory, write_atomically
from fedcdp.files.untrusted import MOST_LINES, read_bounded

_LINE = re.compile(rb'(\{.*),"digest":"([0-9a-f]{32})"\}', re.DOTALL)


class LineError(Exception):
    """A defect in a line; the journal adds the file and the line number."""


class Journal(ABC):
    """One file of chained lines, a header line and any number of others, for one writer at a time.

    The subclass decides what a line may contain and where: it reads every line when the journal is opened.
    """

    BEGINNINGS: ClassVar[tuple[str, ...]]
    """How each line except the first may begin."""

    def __init__(self, path: Path, content: bytes) -> None:
        self.path = path
        self._previous = ""
        self.digests: list[str] = []
        """The digest of every line, in order."""
        *lines, tail = content.split(b"\n")
        whole = b"" if any(_is_cut_short(tail, beginning) for beginning in self.BEGINNINGS) else tail
        if not lines and not _LINE.fullmatch(tail):
            raise RunError(f"{path} has no complete first line; a crash of fedcdp cannot leave that, so it is damaged")
        for number, line in enumerate(lines + [whole] * bool(whole), start=1):
            try:
                (self._read_first if number == 1 else self._read_next)(line)
            except LineError as error:
                raise RunError(f"{path}, line {number}, {error}") from None
            self._previous = line[-34:-2].decode()
            self.digests.append(self._previous)
        self._size = len(content)  # bytes on disk
        self._kept = len(content) - len(tail) + len(whole)  # bytes that count
        self._owed = b"\n" if whole else b""  # a missing newline, to be written before the next line

    @abstractmethod
    def _read_first(self, line: bytes) -> None:
        """Read the first line, or raise `LineError`."""

    @abstractmethod
    def _read_next(self, line: bytes) -> None:
        """Read a further line, or raise `LineError`."""

    @classmethod
    def _begin(cls, path: Path | str, first: Mapping[str, Any]) -> Self:
        """Start a journal, atomically even if killed in here. Refuses a file that exists."""
        path = Path(path)
        try:
            if path.exists():
                raise RunError(f"{path} already exists; a ledger is appended to, never restarted")
            content = _line(first, "") + b"\n"
            journal = cls(path, content)
            write_atomically(path, content, PRIVATE)
        except OSError as error:
            raise not_written(path, error) from error
        except (TypeError, ValueError) as error:
            raise RunError(f"{path} cannot be written: plan and population must be plain values ({error})") from None
        return journal

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Read a journal and verify every line. Writes nothing; refuses damaged or impossible content."""
        try:
            content = read_bounded(path, MOST_LINES)
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
        return cls(Path(path), content)

    def _verified(self, line: bytes, *allowed: tuple[str, ...]) -> dict[str, Any]:
        """The content of a line that is unaltered, has one of the `allowed` sets of keys and follows the line before it."""
        parts = _LINE.fullmatch(line)
        if not parts:
            raise LineError("is damaged")
        if _digest(parts[1]) != parts[2].decode():
            raise LineError("was altered: it does not match its digest")
        try:
            found: dict[str, Any] = json.loads(line.decode())
        except (ValueError, RecursionError):
            raise LineError("is not JSON") from None
        if tuple(found) not in [(*keys, "previous", "digest") for keys in allowed]:
            raise LineError(f"has other keys than {' or '.join(', '.join(keys) for keys in allowed)}")
        if found["previous"] != self._previous:
            raise LineError("does not follow the line before it: lines were removed, added or moved")
        return found

    def _write_line(self, content: Mapping[str, Any]) -> None:
        """Append a line: on return it is on disk; on failure the file is unchanged."""
        line = _line(content, self._previous)
        self._append(line + b"\n")
        self._previous = line[-34:-2].decode()
        self.digests.append(self._previous)

    def _make_sure(self) -> None:
        """Flush the last line to disk: it was read from the file, but a crash may have come before it was flushed."""
        self._append(b"")

    def _append(self, line: bytes) -> None:
        """Append bytes after repairing the end that a crash left: all on disk on return, or the file is unchanged."""
        content = self._owed + line
        try:
            sync_directory(self.path.parent)  # a process killed inside `_begin` may not have done this
            file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)  # a link may point anywhere
            try:
                if os.fstat(file).st_size != self._size:
                    raise StorageError(f"{self.path} was changed by another process since it was read")
                self._write(file, content)
            finally:
                os.close(file)
        except OSError as error:
            raise StorageError(f"{self.path} cannot be written: {error.strerror or error}") from error
        self._kept = self._size = self._kept + len(content)
        self._owed = b""

    def _write(self, file: int, content: bytes) -> None:
        try:
            if self._size > self._kept:
                os.ftruncate(file, self._kept)
                os.fsync(file)  # before writing, so no crash can leave a mixture of the old end and the new
                self._size = self._kept
            while content:
                content = content[os.write(file, content) :]
            os.fsync(file)
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, self._kept)
            raise


def _line(content: Mapping[str, Any], previous: str) -> bytes:
    """A line without its newline. The digest covers everything before it, including the previous line's digest."""
    body = json.dumps({**content, "previous": previous}, separators=(",", ":"), allow_nan=False)[:-1].encode()
    return body + f',"digest":"{_digest(body)}"}}'.encode()


def _digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def _is_cut_short(tail: bytes, beginning: str) -> bool:
    """Whether the bytes after the last newline are a truncated line, rather than a complete or a damaged one."""
    text = tail.decode(errors="replace")
    if not tail.isascii() or not text.isprintable() or text[: len(beginning)] != beginning[: len(text)]:
        return False
    try:
        json.JSONDecoder().raw_decode(text)  # a complete line, perhaps with something after it
        return False
    except (ValueError, RecursionError) as error:
        return isinstance(error, ValueError)
