"""Journals: append-only files of lines that are on the disk before anything that they record is used.

Guarantees:
- A line whose writing has returned is in the file after any crash.
- A line carries a digest of itself and the digest of the line before, so that lines altered, inserted, reordered or dropped
  in the middle are noticed. There is no secret in it: this is against accidents and naive tampering, not against someone
  who writes the whole file anew.
- What a crash leaves behind the last newline: the beginning of a line was never used, and is passed over (and removed before
  the next line is written); a whole line counts. Anything else that does not verify is refused.
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
    """What is wrong with a line, to be said with its file and number."""


class Journal(ABC):
    """One file of chained lines, a first one and any number of others, for one writer at a time.

    What a line may say, and where, is the subclass's: it reads every line as the journal is opened.
    """

    BEGINNINGS: ClassVar[tuple[str, ...]]
    """How each line but the first may begin."""

    def __init__(self, path: Path, content: bytes) -> None:
        self.path = path
        self._previous = ""
        *lines, tail = content.split(b"\n")
        whole = b"" if any(_is_cut_short(tail, beginning) for beginning in self.BEGINNINGS) else tail
        if not lines and not _LINE.fullmatch(tail):
            raise RunError(f"{path} has no whole first line; no crash of this program leaves that, so it is damaged")
        for number, line in enumerate(lines + [whole] * bool(whole), start=1):
            try:
                (self._read_first if number == 1 else self._read_next)(line)
            except LineError as error:
                raise RunError(f"{path}, line {number}, {error}") from None
            self._previous = line[-34:-2].decode()
        self._size = len(content)  # what the disk has
        self._kept = len(content) - len(tail) + len(whole)  # what of it counts
        self._owed = b"\n" if whole else b""  # what is to be written before the next line

    @abstractmethod
    def _read_first(self, line: bytes) -> None:
        """Take in the first line, or raise `LineError`."""

    @abstractmethod
    def _read_next(self, line: bytes) -> None:
        """Take in a further line, or raise `LineError`."""

    @classmethod
    def _begin(cls, path: Path | str, first: Mapping[str, Any]) -> Self:
        """Start a journal: whole or not at all, also when killed in here. Refuses a file that exists."""
        path = Path(path)
        try:
            if path.exists():
                raise RunError(f"{path} already exists; a ledger is added to, never begun anew")
            content = _line(first, "") + b"\n"
            journal = cls(path, content)
            write_atomically(path, content, PRIVATE)
        except OSError as error:
            raise not_written(path, error) from error
        except (TypeError, ValueError) as error:
            raise RunError(f"{path} cannot be written: a plan and a population are plain values ({error})") from None
        return journal

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Read a journal and verify every line of it. Writes nothing; refuses what is damaged or impossible."""
        try:
            content = read_bounded(path, MOST_LINES)
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
        return cls(Path(path), content)

    def _verified(self, line: bytes, *allowed: tuple[str, ...]) -> dict[str, Any]:
        """The content of a line that is what was written, has one of these sets of keys and follows the line before."""
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
        """Add a line: on the disk on return, or the file is as it was before."""
        line = _line(content, self._previous)
        self._append(line + b"\n")
        self._previous = line[-34:-2].decode()

    def _make_sure(self) -> None:
        """See that the last line is on the disk: it was found in the file, but may not have got there before a crash."""
        self._append(b"")

    def _append(self, line: bytes) -> None:
        """Add bytes, after mending what a crash left at the end: all on the disk on return, or as it was before."""
        content = self._owed + line
        try:
            sync_directory(self.path.parent)  # a start that was killed inside `_begin` may not have got that far
            file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)  # a link may lead to anything
            try:
                if os.fstat(file).st_size != self._size:
                    raise StorageError(f"{self.path} was changed by others since it was read")
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
                os.fsync(file)  # first, so that no crash can leave a mixture of the old end and the new
                self._size = self._kept
            while content:
                content = content[os.write(file, content) :]
            os.fsync(file)
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, self._kept)
            raise


def _line(content: Mapping[str, Any], previous: str) -> bytes:
    """A line without its newline. The digest is over all that stands before it, the line before's digest included."""
    body = json.dumps({**content, "previous": previous}, separators=(",", ":"), allow_nan=False)[:-1].encode()
    return body + f',"digest":"{_digest(body)}"}}'.encode()


def _digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def _is_cut_short(tail: bytes, beginning: str) -> bool:
    """Whether bytes behind the last newline are a line cut short, rather than a whole or a damaged one."""
    text = tail.decode(errors="replace")
    if not tail.isascii() or not text.isprintable() or text[: len(beginning)] != beginning[: len(text)]:
        return False
    try:
        json.JSONDecoder().raw_decode(text)  # a whole line, perhaps with something behind it
        return False
    except (ValueError, RecursionError) as error:
        return isinstance(error, ValueError)
