"""The process of one contestant: `python worker.py MODULE TASK`, with MODULE one of the files next to this one.

It runs in any interpreter that has the contestant's library; a missing library is reported, not raised. A contestant's
`serve(task, turns)` prepares everything, then answers each turn with the seconds that a client step took. A step includes
everything: taking the batch, gradients, clipping, noise, update. The start and end of a round (copying the global weights,
summing the updates) are included as well.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_SOURCE = Path(__file__).resolve().parents[2] / "src"


class _ThisFedcdp(MetaPathFinder):
    """Finds fedcdp in this checkout, whichever version the interpreter has; all other modules are the interpreter's own."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(_SOURCE)], target) if name == "fedcdp" and path is None else None


def main() -> None:
    """Import the contestant, and let it serve turns on the standard streams."""
    sys.meta_path.insert(0, _ThisFedcdp())
    from turns import NotPossibleError, Task, Turns

    # Libraries may print; the connection to the caller is separate from their output.
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    turns = Turns(told, sys.stdin)
    module, task = sys.argv[1], Task.read(sys.argv[2])
    try:
        contestant = importlib.import_module(module)
        contestant.serve(task, turns)
    except ImportError as error:
        turns.missing(f"{error.name or module} is not installed ({error})")
    except NotPossibleError as error:
        turns.missing(str(error))
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        turns.missing(f"{type(error).__name__}: {first_line}")
        raise


if __name__ == "__main__":
    main()
