"""The training methods, one file each: pure functions shared by the simulator and deployments."""

from fedcdp.config.plan import MethodName
from fedcdp.methods.base import GradientSum, Local, Method, Moment, Sent
from fedcdp.methods.dssgd import DSSGD
from fedcdp.methods.fedcdp import FedCDP, NoisedExamples
from fedcdp.methods.fedsdp import FedSDP
from fedcdp.methods.nonprivate import NonPrivate
from fedcdp.methods.participation import leave, take_part, take_part_from, train_locally

METHODS: dict[MethodName, Method] = {
    "nonprivate": NonPrivate(),
    "fed-sdp": FedSDP(),
    "fed-cdp": FedCDP(),
    "fed-cdp-decay": FedCDP(),  # the same algorithm; only the plan's clip bound differs
    "dssgd": DSSGD(),
}

__all__ = [
    "DSSGD",
    "METHODS",
    "FedCDP",
    "FedSDP",
    "GradientSum",
    "Local",
    "Method",
    "Moment",
    "NoisedExamples",
    "NonPrivate",
    "Sent",
    "leave",
    "take_part",
    "take_part_from",
    "train_locally",
]
