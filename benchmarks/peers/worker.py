"""The process of one contestant: `python worker.py MODULE TASK`, with MODULE one of the files beside this one.

It runs in any interpreter that has the contestant's library; what that lacks is said, not raised. A contestant's
`serve(task, turns)` makes everything ready, then answers each turn with the seconds that a client step took. A step is
everything: take the batch, gradients, clip, noise, update. What a round begins and ends with (copy the global weights,
add up what is sent) is in the figure, too.
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
    """Finds fedcdp in this checkout, whichever the interpreter has; everything else is the interpreter's own."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(_SOURCE)], target) if name == "fedcdp" and path is None else None


def main() -> None:
    """Import the contestant, and let it serve turns on the standard streams."""
    sys.meta_path.insert(0, _ThisFedcdp())
    from turns import NotPossibleError, Task, Turns

    # Libraries like to print; the line to the caller is kept apart from them.
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
