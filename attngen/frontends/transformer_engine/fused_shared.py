"""Words that `fused_attn_fwd` and `fused_attn_bwd` share, and what these mean."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from ...errors import SpecError
from ...spec.layouts import size
from .calls import LENGTHS
from .eight_bits import is_stored, refuse_unstored
from .layouts import parsed
from .names import AttnMaskType, FusedAttnBackend, QKVFormat
from .variants import Read, Variant, batch_of, length_reads, mask_of, variant_of


class Arguments(Protocol):
    """Arguments of either function."""

    q: Tensor
    k: Tensor
    qkv_layout: str
    o_format: str
    attn_bias_type: str
    attn_mask_type: str
    softmax_type: str
    window_size: tuple[int, int]
    bottom_right_diagonal: bool | None
    attn_scale: float | None
    fused_attention_backend: Any


def check(call: Arguments, *quantizers: Any) -> None:
    """Raises: ValueError for a backend that computes nothing, or is not there, and where tensors in
    16 bits come with quantizers."""
    backend = FusedAttnBackend.cast(call.fused_attention_backend)
    if backend == FusedAttnBackend.No_Backend:
        raise SpecError(
            f"no fused attention for qkv_layout={call.qkv_layout!r}, "
            f"attn_bias_type={call.attn_bias_type!r}, attn_mask_type={call.attn_mask_type!r}, "
            f"q.shape={list(call.q.shape)}, q.dtype={call.q.dtype}: the backend is No_Backend. "
            "get_fused_attn_backend says why with NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2"
        )
    QKVFormat[call.o_format]
    if not is_stored(call.q):
        refuse_unstored(quantizers, backend == FusedAttnBackend.FP8)


def words_of(call: Arguments, layout: str) -> Variant:
    """The variant of a call that is given in this layout. Raises: KeyError for a word."""
    AttnMaskType[mask_of(call.attn_mask_type)]  # arbitrary masks have no number, and no argument
    variant = variant_of(
        layout,
        call.attn_mask_type,
        call.window_size,
        call.bottom_right_diagonal,
        call.softmax_type,
        call.attn_bias_type,
    )
    return replace(variant, softmax_scale=call.attn_scale)


def lengths_of(call: Arguments, layout: str, page_table: Tensor | None = None) -> list[Read]:
    """The lengths that a call needs. Raises: SpecError where one is missing."""
    batch = batch_of(layout, call.q, call.k, page_table)
    present = {name for name in LENGTHS if getattr(call, name) is not None}
    return length_reads(layout, "padding" in call.attn_mask_type, batch, present)


def heads_of(call: Arguments) -> int:
    """Query heads of a call."""
    axes = parsed(call.qkv_layout).q_format
    return size(call.q.shape, axes, "h")


def stats_of(lse: Tensor, axes: str) -> Tensor:
    """The log-sum-exp with TransformerEngine's shape, [b, h, s, 1] or [t, h, 1]; a view."""
    return (lse.t() if axes == "thd" else lse).unsqueeze(-1)


def lse_of(stats: Tensor, axes: str) -> Tensor:
    """The log-sum-exp [b, h, s] or [h, t] of TransformerEngine's stats; a view."""
    lse = stats.squeeze(-1)
    return lse.t() if axes == "thd" else lse
