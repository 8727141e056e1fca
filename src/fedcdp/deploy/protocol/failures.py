"""How often each client of a run has failed in secure sums, stored in the run directory.

```
RUN/failures.json   the number of failures by the number of the client
```

A client that failed twice is left out of the rest of the run: nobody may stop every round by dropping out of each. The
counts outlast the server's process. Without the file they start at zero, which lets every client back in.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from fedcdp.errors import RunError
from fedcdp.files.disk import write_atomically
from fedcdp.files.untrusted import MOST_JSON, parse_json, read_bounded

MOST_FAILURES = 2
"""A client that failed this often is left out of the rest of the run."""


class Failures:
    """Counts of failures by client; with a file, each is on disk before the next message is sent."""

    def __init__(self, path: Path | None = None) -> None:
        """Without a path, the counts are in memory only."""
        self._path = path
        self._counts = Counter[int]() if path is None or not path.exists() else _read(path)

    def add(self, client: int) -> None:
        """Count one more failure of a client."""
        self._counts[client] += 1
        if self._path is not None:
            written = {str(number): count for number, count in sorted(self._counts.items())}
            write_atomically(self._path, json.dumps({"failures": written}).encode())

    def too_many(self) -> set[int]:
        """The clients to leave out."""
        return {client for client, count in self._counts.items() if count >= MOST_FAILURES}


def _read(path: Path) -> Counter[int]:
    try:
        written = parse_json(read_bounded(path, MOST_JSON))["failures"]
        counts = Counter({int(number): count for number, count in written.items() if number.isascii() and number.isdigit()})
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, AttributeError):
        raise RunError(f"{path} is damaged") from None
    if len(counts) != len(written) or any(type(count) is not int or count < 1 for count in counts.values()):
        raise RunError(f"{path} is damaged: it must hold a number of failures for each number of a client")
    return counts
