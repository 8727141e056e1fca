"""Programs outside the package and its tests: each tries for minutes or hours to break something. Run with `python -m`."""
