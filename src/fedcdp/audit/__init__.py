"""The audit: an empirical lower bound on ε, to compare with the accountant's statement."""

from fedcdp.audit.lower_bound import ADVERSARIES, UNITS, Audit, audit
from fedcdp.audit.one_run import OneRunAudit, audit_one_run

__all__ = ["ADVERSARIES", "UNITS", "Audit", "OneRunAudit", "audit", "audit_one_run"]
