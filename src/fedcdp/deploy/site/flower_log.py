"""The log of a kept process: its lines as they are, or as JSON, on standard output or in files that rotate.

A file is readable by its owner only, also after a rotation. A line of JSON has `time` (UTC), `level`, `source` and
`message`. Terminal colours and control characters are removed: what another machine sends may be in a line.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import sys
import threading
from contextlib import suppress
from io import TextIOWrapper
from logging import LogRecord, getLevelName, getLevelNamesMapping
from logging.handlers import RotatingFileHandler
from pathlib import Path

from fedcdp.files.disk import PRIVATE, open_unlinked
from fedcdp.files.untrusted import printable

FORMATS = ("text", "json")
_COLOUR = re.compile("\x1b\\[[0-9;]*[A-Za-z]")
_LEVEL = re.compile(r"(?:\d{4}-\S+Z\s+)?(DEBUG|INFO|WARNING|ERROR|CRITICAL)\s*(?::\s*|(?=\[))")  # Flower's, and its server's
_LONGEST = 2**14


class FlowerLog:
    """Writes lines; each is complete in one file. Threads may write at the same time."""

    def __init__(self, source: str, form: str, path: Path | None = None, most_bytes: int = 0, files: int = 0) -> None:
        """Without a path, lines go to standard output."""
        self._source, self._form = source, form
        self._file = None if path is None else _PrivateFile(path, maxBytes=most_bytes, backupCount=files, encoding="utf-8")
        self._lock = threading.Lock()
        self._level = "INFO"

    def line(self, text: str) -> None:
        """Write a line of the process."""
        plain = printable(_COLOUR.sub("", text.rstrip("\r\n")[:_LONGEST]).replace("\t", "    "))
        found = _LEVEL.match(plain)
        level = found[1] if found else self._level if plain.startswith(" ") else "INFO"
        self._level = level  # the lines of a longer message are indented
        self._write(level, plain[found.end() :] if found else plain, plain)

    def say(self, level: str, text: str) -> None:
        """Write a line of our own."""
        self._write(level, text, f"{level:<8}: {text}")

    def _write(self, level: str, message: str, plain: str) -> None:
        if self._form == "json":
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            plain = json.dumps({"time": now, "level": level, "source": self._source, "message": message.strip()})
        with self._lock:
            if self._file is None:
                with suppress(OSError):  # a full disk or a reader that is gone must not stop a node
                    print(plain, flush=True)
            else:
                number = getLevelNamesMapping().get(level, 20)
                self._file.emit(LogRecord(getLevelName(number), number, "", 0, plain, (), None))


class _PrivateFile(RotatingFileHandler):
    """Files of mode 0600. A symbolic link is not followed."""

    def _open(self) -> TextIOWrapper:
        path = Path(self.baseFilename)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        opened = open_unlinked(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE)
        return TextIOWrapper(os.fdopen(opened, "ab"), encoding=self.encoding, write_through=True)

    def handleError(self, record: LogRecord) -> None:  # noqa: N802 (its name in logging)
        """A full disk must not stop a node: the line goes to standard error."""
        print(record.getMessage(), file=sys.stderr, flush=True)
