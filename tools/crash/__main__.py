"""`python -m tools.crash`: all interruptions of all scenarios."""

from __future__ import annotations

import sys

from tools.crash.interruptions import main

if __name__ == "__main__":
    sys.exit(main())
