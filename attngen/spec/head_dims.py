"""Head dims: which ones the kernels of a spec have, and what binds them."""

from __future__ import annotations

from . import layouts
from .attention_spec import DTYPES_8BIT, DTYPES_16BIT, MAX_HEAD_DIM, AttentionSpec
from .problem import LISTED
from .violations import Violation

# Of the kernels that split keys: the largest, and what they have no room for beyond.
SPLIT_HEAD_DIMS = {
    "head_dim": (576, "64 queries and two stages of 32 keys and values take 208 of 227 KiB"),
    "head_dim_v": (512, "64 rows of output take 128 registers a thread of two warpgroups"),
}
# Of a forward in 16 bits beyond MAX_HEAD_DIM, of which nothing is asked but its outputs.
WIDE_HEAD_DIMS = {
    "head_dim": (576, "64 queries and a block of 64 keys and values take 208 of 227 KiB"),
    "head_dim_v": SPLIT_HEAD_DIMS["head_dim_v"],
}
LEAST_WIDE_COLUMNS = 65  # of V beside wider queries: two warpgroups share boxes of 64


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
    forward = _has_wide_forward(spec)
    for field, given in (("head_dim", spec.head_dim), ("head_dim_v", spec.head_dim_v)):
        if given is None and not (forward and spec.head_dim > MAX_HEAD_DIM):
            continue
        dim = spec.head_dim if given is None else given
        limit, why = (
            SPLIT_HEAD_DIMS[field] if wide
            else WIDE_HEAD_DIMS[field] if forward
            else (MAX_HEAD_DIM, "")
        )  # fmt: skip
        legal = min(max(step, -(-dim // step) * step), limit)
        if dim != legal:
            which = f"multiples of {step} up to" if step > 1 else "1 to"
            reason = f"{field} {dim}: kernels exist for {which} {limit}"
            if dim > limit and not (wide or forward) and spec.dtype in DTYPES_16BIT:
                if not layouts.parse(spec.layout).paged and not spec.widens:
                    reason += f", those of a forward alone to {WIDE_HEAD_DIMS[field][0]}"
                reason += f", those that split keys (decode) to {SPLIT_HEAD_DIMS[field][0]}"
            limited = f", where {why}" if why and dim > limit else ""
            found.append(Violation(field, reason + limited, legal))
    columns = spec.head_dim_v
    if forward and not found and spec.head_dim > MAX_HEAD_DIM and columns is not None:
        if columns < LEAST_WIDE_COLUMNS:
            reason = f"head_dim_v {columns}: beside head dims above {MAX_HEAD_DIM} kernels exist "
            reason += f"for {LEAST_WIDE_COLUMNS} or more, of which two warpgroups share boxes of 64"
            found.append(Violation("head_dim_v", reason, LEAST_WIDE_COLUMNS))
    return found


def _has_wide_forward(spec: AttentionSpec) -> bool:
    """Whether its forward has kernels of head dims above MAX_HEAD_DIM: of 16-bit operands that do
    not lie in pages, where no backward and no blocks of a mask made before are asked for."""
    if spec.mask_mod == LISTED:
        return False
    dtypes = {spec.dtype, spec.kv_dtype or spec.dtype}
    paged = layouts.parse(spec.layout).paged
    return spec.directions == ("fwd",) and dtypes <= {*DTYPES_16BIT} and not (spec.decode or paged)
