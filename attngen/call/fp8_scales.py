"""Numbers of scales by which a backward stores 8 bits, whatever library computes it."""

from __future__ import annotations

import math

from .dropout import keep_scale

BACKWARDS = ("16", "fp8", "fp8_or_16")
"""Choices of recipes for the bits in which gradients are made, of any library."""
MIXED = "mixed"
"""The choice of S and dP from 8 bits and gradients from 16, of PyTorch's recipes."""
ALGORITHMS = ("max", "most_recent")
"""Ways in which delayed scaling reads a history of largest magnitudes."""
LARGEST_EXPONENT = 126
"""The largest exponent of scales that are powers of two, and with its sign the smallest."""
KEPT_SCALES = 2.0**-60, 2.0**60
"""The least and the largest scale of weights that kernels hold (scale_gradients.cuh)."""
DS_BOUND = 2.5
"""|dP| and |D| are at most d_v · max |dO| · max |V| each, and dO, which is rounded twice, in them
an eighth above: of both together that many times."""


def scale_of_weights(largest: float, dropout_p: float) -> float:
    """The largest power of two with which no weight saturates in an 8-bit format, whose largest
    number that is; 1 / (1 − p) is the largest weight that there may be."""
    return float(2.0 ** math.floor(math.log2(largest / max(keep_scale(dropout_p), 1.0))))


def delayed_violations(margin: object, steps: object, algorithm: object) -> list[str]:
    """Reasons against margin, amax_history_len and amax_compute_algo of delayed scaling."""
    reasons = []
    if not isinstance(margin, int) or abs(margin) > 64:
        reasons.append(f"margin needs an int in -64..64; got {margin!r}")
    if not isinstance(steps, int) or steps < 1:
        reasons.append(f"amax_history_len needs an int >= 1; got {steps!r}")
    if not (callable(algorithm) or algorithm in ALGORITHMS):
        allowed = ", ".join(ALGORITHMS)
        reasons.append(f"amax_compute_algo needs {allowed} or a function; got {algorithm!r}")
    return reasons
