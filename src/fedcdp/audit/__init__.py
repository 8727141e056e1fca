"""The audit: an empirical lower bound on ε, to compare with the accountant's statement."""

from fedcdp.audit.lower_bound import ADVERSARIES, UNITS, Audit, audit

__all__ = ["ADVERSARIES", "UNITS", "Audit", "audit"]
