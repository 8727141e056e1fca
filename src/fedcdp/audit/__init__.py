"""The audit: a lower bound on ε by attack, beside what the accountant states."""

from fedcdp.audit.lower_bound import ADVERSARIES, UNITS, Audit, audit

__all__ = ["ADVERSARIES", "UNITS", "Audit", "audit"]
