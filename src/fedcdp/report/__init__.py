"""The report: one HTML page for one or several runs and for what attacks got out of them."""

from fedcdp.report.api import report

__all__ = ["report"]
