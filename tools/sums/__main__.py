"""`python -m tools.sums`: the trial, with its result as JSON."""

from __future__ import annotations

from tools.sums.trial import main

if __name__ == "__main__":
    main()
