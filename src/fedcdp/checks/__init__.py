"""Checks of training loops that are not fedcdp's: their settings, or a function that returns what leaves a client."""

from fedcdp.checks.api import check
from fedcdp.checks.findings import Check, Finding
from fedcdp.checks.flower_settings import FlowerSettings, LocalDpSettings
from fedcdp.checks.opacus_settings import OpacusSettings

__all__ = ["Check", "Finding", "FlowerSettings", "LocalDpSettings", "OpacusSettings", "check"]
