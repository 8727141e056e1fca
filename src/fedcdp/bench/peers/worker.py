"""The process of one contestant: `python worker.py MODULE TASK`, with MODULE one of the files beside this one.

It runs in any interpreter that has the contestant's library; what that lacks is said, not raised.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def main() -> None:
    """Import the contestant, and let it serve turns on the standard streams."""
    # fedcdp itself, for its networks, behind everything that this interpreter has of its own.
    sys.path.append(str(_HERE.parents[2]))
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
        turns.missing(f"{error.name or module} is not installed for {sys.executable}: {error}")
    except NotPossibleError as error:
        turns.missing(str(error))
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        turns.missing(f"{type(error).__name__}: {first_line}")
        raise


if __name__ == "__main__":
    main()
