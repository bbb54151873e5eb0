"""Mixed backwards of FP8, with products of weights and of dS in 16 bits: which specs have one."""

from __future__ import annotations

from .attention_spec import DTYPES_8BIT, AttentionSpec
from .problem import MIXED_BIASED_HEAD_DIM, MIXED_HEAD_DIM
from .violations import Violation

MIXED = "mixed"


def check_mixed(spec: AttentionSpec) -> list[Violation]:
    """Find why a spec has no mixed backward that it asks for."""
    if spec.backward is None:
        return []
    if spec.backward != MIXED:
        reason = f"backward {spec.backward!r} is unknown; available: {(MIXED,)}, or None"
        return [Violation("backward", reason, None)]
    if spec.dtype not in DTYPES_8BIT:
        reason = f"backward 'mixed' belongs to FP8 operands; {spec.dtype!r} ones have 16 bits"
        return [Violation("backward", reason, None)]
    largest = max(spec.head_dim, spec.head_dim_v or spec.head_dim)
    found = []
    if largest > MIXED_HEAD_DIM:
        reason = f"backward 'mixed' has head dims up to {MIXED_HEAD_DIM}, where operands in 8 and "
        reason += f"in 16 bits fill 224 of 227 KiB; got {largest}"
        found.append(Violation("backward", reason, None))
    elif spec.bias in ("pre_scale", "post_scale") and largest > MIXED_BIASED_HEAD_DIM:
        reason = f"backward 'mixed' has a bias up to head dim {MIXED_BIASED_HEAD_DIM}, beyond "
        reason += f"which its 16 KiB a block are not free (224 of 227 KiB at 128); got {largest}"
        found.append(Violation("backward", reason, None))
    return found
