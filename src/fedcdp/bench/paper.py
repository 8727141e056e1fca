"""What the paper printed: milliseconds per local iteration of one client.

Wei et al., ICDCS 2021, Table "Time cost per local iteration per client (ms)", on a 4-core i5 with a GeForce 2080 Ti.
"""

from __future__ import annotations

DATASETS = ("mnist", "cifar10", "lfw", "adult", "cancer")
METHODS = ("nonprivate", "fed-sdp", "fed-cdp", "fed-cdp-decay")

_PRINTED = {
    "nonprivate": (6.8, 32.5, 30.9, 5.1, 5.1),
    "fed-sdp": (6.9, 33.8, 31.3, 5.2, 5.1),
    "fed-cdp": (22.4, 131.5, 112.4, 11.8, 11.9),
    "fed-cdp-decay": (22.6, 132.1, 114.6, 12.1, 12.0),
}


def printed_ms(dataset: str, method: str) -> float:
    """The paper's milliseconds for one of DATASETS and one of METHODS."""
    return _PRINTED[method][DATASETS.index(dataset)]
