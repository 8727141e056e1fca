"""Deployments of real processes start as commands do."""

from __future__ import annotations

from tests.cli.conftest import Start, start, workplace

__all__ = ["Start", "start", "workplace"]
