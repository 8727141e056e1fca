"""Check that a printed ε holds: against an independent accountant, and against attacks."""
