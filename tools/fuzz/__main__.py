"""`python -m tools.fuzz`: the campaign over all targets."""

from __future__ import annotations

from tools.fuzz.campaign import main

if __name__ == "__main__":
    main()
