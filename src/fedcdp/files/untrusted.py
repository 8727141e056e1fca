"""Safe reading of untrusted files: bounded size, bounded nesting, and no control characters in printed text.

| file | limit |
| --- | --- |
| settings (TOML) | 256 KiB, 200 dots a line |
| JSON | 64 MiB |
| a ledger, metrics | 1 GiB |
| unpacked content of a packed file | 256 MiB or 50 times its packed size, if larger; for a benchmark, its known size |
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any, BinaryIO

MOST_SETTINGS = 2**18
MOST_JSON = 2**26
MOST_LINES = 2**30
MOST_UNPACKED = 2**28
MOST_RATIO = 50
_MOST_DOTS = 200  # the parser takes n² steps for a key of n parts
# C0 and C1 control characters, line and paragraph separators, marks that change the text direction, and lone surrogates.
_OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def read_bounded(path: Path | str, most: int, *, stream: bool = False) -> bytes:
    """The bytes of a file of at most `most` bytes. A larger file raises `OSError`, as an unreadable one does.

    Only regular files are read, since a pipe may never end and a device has no size. With `stream`, for a path that the
    user gave, anything that ends within `most` bytes is read.
    """
    try:
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if stream else os.O_NONBLOCK))
    except ValueError as error:  # a name that no file can have
        raise OSError(errno.EINVAL, "it is not a valid file name") from error
    with os.fdopen(opened, "rb") as file:
        found = os.fstat(opened)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not (stream or stat.S_ISREG(found.st_mode)):
            raise OSError(errno.EINVAL, "it is not a regular file")
        if found.st_size <= most:
            content = file.read() if stat.S_ISREG(found.st_mode) else _first(file, most + 1)
    if found.st_size > most or len(content) > most:
        raise OSError(errno.EINVAL, f"it is larger than {most:,} bytes")
    return content


def _first(file: BinaryIO, most: int) -> bytes:
    """Read up to `most` bytes, without allocating more memory than the file fills."""
    content = b""
    while len(content) < most and (more := file.read(min(2**16, most - len(content)))):
        content += more
    return content


def parse_toml(content: bytes | str) -> dict[str, Any]:
    """Parse TOML into plain values; any defect is a `ValueError`."""
    text = content if isinstance(content, str) else content.decode("utf-8")
    if any(line.count(".") > _MOST_DOTS for line in text.splitlines()):
        raise ValueError(f"a line has more than {_MOST_DOTS} dots")
    try:
        return tomllib.loads(text.replace("\r\n", "\n"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_json(content: bytes | str) -> Any:
    """Parse JSON into plain values; any defect is a `ValueError`."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def most_unpacked(packed: int) -> int:
    """The largest unpacked size that is accepted from a file of `packed` bytes."""
    return max(MOST_UNPACKED, MOST_RATIO * packed)


def printable(text: str) -> str:
    """Escape every character that would move the cursor, change a colour, end a line or change the text direction."""
    return _OBEYED.sub(lambda found: repr(found[0])[1:-1], text)
