"""An accountant that shares no code with the one of the package, which it checks."""
