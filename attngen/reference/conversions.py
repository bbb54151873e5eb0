"""Arguments as calls give them, in the form in which attention is defined of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call.table import ROW_OF_OPERAND, ROWS, AttentionCall, named
from ..spec import plain
from .fp8_checks import FLOATS
from .masks import visible
from .placed import with_places


def converted(call: AttentionCall) -> AttentionCall:
    """The call with plain numbers, places for positions in tensors, and a mask for a CausalBias;
    itself where it has these."""
    changed = plain.differing(named(call))
    if changed:
        call = AttentionCall(**{**named(call), **changed})
    call = with_places(call)
    for name in ("attn_mask", "bias"):
        if (mask := plain.causal_variant(getattr(call, name))) is not None:
            call = _without_causal_bias(call, name, mask)
    return call


def _without_causal_bias(call: AttentionCall, name: str, mask: str) -> AttentionCall:
    """The call with a mask of that name, or with booleans where it has more that a mask's name
    would change."""
    bias, others = getattr(call, name), {**named(call), name: None}
    if plain.is_mask_by_name(named(call), name, call.q, call.k, call.v):
        return AttentionCall(**{**others, "mask": mask})
    shown = visible(bias.seq_len_q, bias.seq_len_kv, mask=mask, device=call.q.device)
    if others["attn_mask"] is not None:
        shown = others["attn_mask"] & shown
    return AttentionCall(**{**others, "attn_mask": shown})


def dtype_of(name: str, tensor: Tensor, q: torch.dtype) -> torch.dtype | None:
    """The dtype that a tensor argument is cast to; None where it stays as it is. Biases have that
    of q; sinks, slopes and scales float32, or float64 beside such a q."""
    if tensor.dtype not in FLOATS:
        return None
    wants = ROW_OF_OPERAND[name].dtype
    if wants == "q":
        wanted = q if q in FLOATS else tensor.dtype
    elif wants == "float32":
        wanted = torch.float32 if tensor.dtype != q or q != torch.float64 else q
    else:
        return None
    return None if wanted == tensor.dtype else wanted


def saturated(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another floating dtype, with its gradient: finite numbers out of range become
    the largest finite ones, and −∞ stays. What is broadcast is cast once."""
    shape, largest = tensor.shape, torch.finfo(dtype).max
    if not torch.compiler.is_compiling():
        axes = zip(shape, tensor.stride(), strict=True)
        tensor = tensor[tuple(slice(1) if step == 0 and n > 1 else slice(None) for n, step in axes)]
    if torch.finfo(tensor.dtype).max > largest:
        wide = tensor if tensor.dtype.itemsize >= 4 else tensor.float()  # which has that number
        tensor = torch.where(wide == float("-inf"), wide, wide.clamp(-largest, largest))
    return tensor.to(dtype).expand(shape)


def with_dtypes(call: AttentionCall) -> AttentionCall:
    """The call with its tensors in the dtypes that attention is defined of."""
    changed: dict[str, Any] = {
        name: saturated(tensor, dtype)
        for name, row in ROWS.items()
        if row.dtype in ("q", "float32")
        and isinstance(tensor := getattr(call, name), Tensor)
        and (dtype := dtype_of(name, tensor, call.q.dtype)) is not None
    }
    added = tuple((name, _as_defined(x, call.q.dtype)) for name, x in call.fragment_arguments)
    if any(a is not b for (_, a), (_, b) in zip(added, call.fragment_arguments, strict=True)):
        changed["fragment_arguments"] = added
    return AttentionCall(**{**named(call), **changed}) if changed else call


def _as_defined(value: Any, q: torch.dtype) -> Any:
    """An argument of a fragment, a tensor in the dtype that it is defined of."""
    dtype = dtype_of("fragment_0", value, q) if isinstance(value, Tensor) else None
    return value if dtype is None else saturated(value, dtype)
