"""Head dims: which ones the kernels of a spec have, and what binds them."""

from __future__ import annotations

from . import layouts
from .attention_spec import (
    DTYPES_8BIT,
    DTYPES_16BIT,
    MAX_HEAD_DIM,
    MAX_TRAINED_HEAD_DIM,
    AttentionSpec,
)
from .violations import Violation

Limits = dict[str, tuple[int, str]]  # by field: the largest, and why

# Of the kernels that split keys: the largest, and what they have no room for beyond.
SPLIT_HEAD_DIMS: Limits = {
    "head_dim": (576, "64 queries and two stages of 32 keys and values take 208 of 227 KiB"),
    "head_dim_v": (512, "64 rows of output take 128 registers a thread of two warpgroups"),
}
# Of a forward in 16 bits beyond MAX_HEAD_DIM, of which nothing is asked but its outputs.
WIDE_HEAD_DIMS: Limits = {
    "head_dim": (576, "64 queries and a block of 64 keys and values take 208 of 227 KiB"),
    "head_dim_v": SPLIT_HEAD_DIMS["head_dim_v"],
}
# Of a backward in 16 bits.
TRAINED_HEAD_DIMS = dict.fromkeys(
    ("head_dim", "head_dim_v"),
    (
        MAX_TRAINED_HEAD_DIM,
        "each of two CTAs has half of the columns of dK and dV, 128 registers a thread",
    ),
)


def head_dim_step(spec: AttentionSpec, dtype: str) -> int:
    """Head dims are multiples of this: where the copy engine alone reads, a row of any operand is a
    number of 16-byte units."""
    if dtype in DTYPES_8BIT or spec.widens:
        return 16
    return 8 if spec.decode or layouts.parse(spec.layout).paged else 1


def check_head_dims(spec: AttentionSpec, step: int) -> list[Violation]:
    """Head dims that no kernel has. step: of which they are multiples."""
    found = []
    wide = spec.decode or spec.directions == ("append",)
    widest = _wide_head_dims(spec)
    for field, given in (("head_dim", spec.head_dim), ("head_dim_v", spec.head_dim_v)):
        if given is None and not (widest and spec.head_dim > MAX_HEAD_DIM):
            continue
        dim = spec.head_dim if given is None else given
        limit, why = (
            SPLIT_HEAD_DIMS[field] if wide
            else widest[field] if widest
            else (MAX_HEAD_DIM, "")
        )  # fmt: skip
        legal = min(max(step, -(-dim // step) * step), limit)
        if dim != legal:
            which = f"multiples of {step} up to" if step > 1 else "1 to"
            reason = f"{field} {dim}: kernels exist for {which} {limit}"
            if dim > limit and not (wide or widest) and spec.dtype in DTYPES_16BIT:
                if not spec.widens:
                    reason += f", those of a forward alone to {WIDE_HEAD_DIMS[field][0]}"
                reason += f", those that split keys (decode) to {SPLIT_HEAD_DIMS[field][0]}"
            limited = f", where {why}" if why and dim > limit else ""
            found.append(Violation(field, reason + limited, legal))
    return found


def _wide_head_dims(spec: AttentionSpec) -> Limits | None:
    """Limits above MAX_HEAD_DIM, where kernels have such head dims: of 16-bit operands."""
    dtypes = {spec.dtype, spec.kv_dtype or spec.dtype}
    computes = {*spec.directions} <= {"fwd", "bwd"}
    if not (computes and dtypes <= {*DTYPES_16BIT}) or spec.decode:
        return None
    return TRAINED_HEAD_DIMS if "bwd" in spec.directions else WIDE_HEAD_DIMS
