"""Scales of FP8 operands: one a tensor or a head, or one a token and head."""

from __future__ import annotations

from collections.abc import Iterator

from ..io.text import closest, suggestion
from .attention_spec import DTYPES_8BIT, AttentionSpec
from .violations import Violation

SCALINGS = ("tensor", "token")


def check_scaling(spec: AttentionSpec) -> Iterator[Violation]:
    """Find why a spec has no kernels with the scales that it asks for."""
    if spec.scaling not in SCALINGS:
        reason = f"scaling {spec.scaling!r} is unknown; available: {SCALINGS}"
        meant = closest(spec.scaling, SCALINGS) or "tensor"
        yield Violation("scaling", reason + suggestion(spec.scaling, SCALINGS), meant)
    if spec.scaling == "token":
        for reason in _refusals(spec):
            yield Violation("scaling", f"scaling 'token' {reason}", "tensor")


def _refusals(spec: AttentionSpec) -> Iterator[str]:
    """Why kernels have no scales of tokens beside what else a spec asks for."""
    if spec.directions == ("cast",):
        return
    if spec.dtype not in DTYPES_8BIT:
        yield f"belongs to FP8 operands, and to casts to them; {spec.dtype!r} ones have no scales"
    if spec.return_max_logit:
        yield "adds logarithms of values' scales to scores, whose largest is lost"
    if "bwd_cast" in spec.directions:
        yield "has no cast of output gradients, which are stored in 8 bits for a backward in 8 bits"
    if "bwd" in spec.directions:
        yield (
            "has no backward in 8 bits: dV, dK and dQ are sums over tokens, which no scale of a "
            "token can be taken out of; one in 16 bits serves it"
        )
