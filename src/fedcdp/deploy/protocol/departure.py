"""Whether a client takes part in anything: its owner may leave the federation, and come back.

```
STATE/left   exists while the client has left
```

A client that has left accepts no task, releases nothing, and deletes its run keys, and the features that it kept of its
records. What it has released stays in its ledger.
"""

from __future__ import annotations

import os
from pathlib import Path

from fedcdp.errors import RefusedError
from fedcdp.files.disk import not_written, open_unlinked

_FILE = "left"


def has_left(state: Path) -> bool:
    """Whether the client has left."""
    return (state / _FILE).exists()


def check_member(state: Path) -> None:
    """Raise `RefusedError` if the client has left."""
    if has_left(state):
        raise RefusedError("this client has left the federation", final=True, kind="left")


def leave(state: Path) -> None:
    """Leave: from now on everything is refused."""
    from fedcdp.deploy.protocol.kept_features import forget_features
    from fedcdp.deploy.protocol.sum_keys import forget_keys

    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(open_unlinked(state / _FILE, os.O_WRONLY | os.O_CREAT))
        forget_keys(state)
        forget_features(state)
    except OSError as error:
        raise not_written(state / _FILE, error) from error


def come_back(state: Path) -> None:
    """Take part again."""
    (state / _FILE).unlink(missing_ok=True)
