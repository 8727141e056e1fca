"""`python -m tools.rogue`: the trial with hand-written and generated sequences."""

from __future__ import annotations

from tools.rogue.server import main

if __name__ == "__main__":
    main()
