"""xformers' `memory_efficient_attention`, its bias classes taken as what they mean."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...call.taking import taking
from ...errors import SpecError
from .flash import attend
from .lengths import packed

__all__ = ["memory_efficient_attention"]
_ALONE, _GROUPED = 3, 5  # axes of operands without heads, and with groups of them
# Classes by their names, so that the library is not imported: whether they are causal, and whether
# the diagonal ends at the last key.
_DENSE = {
    "LowerTriangularMask": (True, False),
    "LowerTriangularMaskWithTensorBias": (True, False),
    "LowerTriangularFromBottomRightMask": (True, True),
    "LowerTriangularFromBottomRightLocalAttentionMask": (True, True),
    "LocalAttentionFromBottomRightMask": (False, True),
}
_BLOCKS = {
    "BlockDiagonalMask": (False, False),
    "BlockDiagonalCausalMask": (True, False),
    "BlockDiagonalCausalFromBottomRightMask": (True, True),
    "BlockDiagonalCausalLocalAttentionMask": (True, False),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (True, True),
    "BlockDiagonalPaddedKeysMask": (False, True),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": (True, True),
    "BlockDiagonalLocalAttentionPaddedKeysMask": (False, True),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (True, True),
    "BlockDiagonalGappyKeysMask": (False, True),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": (True, True),
}
_PAGES = {
    "PagedBlockDiagonalPaddedKeysMask": (False, True),
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": (True, True),
}
# Of sequences that begin behind the first row of their pages.
_GATHERED = {
    "PagedBlockDiagonalGappyKeysMask": (False, True),
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask": (True, True),
}
_KNOWN = {**_DENSE, **_BLOCKS, **_PAGES, **_GATHERED}


@dataclass(slots=True, eq=False)
class Attention:
    """Arguments of the function."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_bias: Any = None
    p: float = 0.0
    scale: float | None = None
    _: KW_ONLY
    op: Any = None
    output_dtype: Any = None
    backend: str = "auto"


@taking(Attention)
def memory_efficient_attention(call: Attention) -> Tensor:
    """Attention with the signature of `xformers.ops.memory_efficient_attention`.

    Args:
        query: [b, s_q, h, d], [b, s_q, d], or [b, s_q, g, h, d] of groups of heads.
        key, value: [b, s_kv, h, d and d_v], and so on; heads of a group that are one, expanded, are
            read once. With a mask of blocks all sequences lie in a row, [1, t, h, d].
        attn_bias: a tensor, a broadcast of [b, h, s_q, s_kv], which has a gradient, or an object of
            a class of `xformers.ops.fmha.attn_bias`.
        p: probability in 0..1 that a weight is dropped.
        scale: of the scores; None is 1/√d.
        op: of xformers' kernels, which says how and never what these compute: unread.
        output_dtype: as out_dtype of `attngen.attention`.
        backend: as of `attngen.attention`.

    Returns: the output, in the query's axes.

    Raises: SpecError for a class that has no kernel here, and with every violation at once.
    """
    q, k, v = (_with_heads(x) for x in (call.query, call.key, call.value))
    given: dict[str, Any] = {"softmax_scale": call.scale, "backend": call.backend}
    if call.p > 0:
        given["dropout_p"] = call.p
    if call.output_dtype is not None:
        given["out_dtype"] = call.output_dtype
    bias, kind = call.attn_bias, type(call.attn_bias).__name__
    rows = q.shape[:2]
    if isinstance(bias, Tensor):
        given["bias"] = _with_four_axes(bias)
    elif bias is not None:
        given |= _band(bias, kind)
    if kind in _BLOCKS or kind in _PAGES or kind in _GATHERED:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        if kind in _GATHERED:
            ends, place = _places(bias)
            k, v = k[place], v[place]
            given |= packed("q", bias.q_seqinfo.seqstart, None) | packed("kv", ends, None)
            given["layout"] = "thd"
        else:
            given |= _blocks(bias)
        if kind in _PAGES:
            k, v = (x.unflatten(0, (-1, bias.page_size)) for x in (k, v))
    out, _ = attend((q, k, v), given, False)
    return out.reshape(*rows, *call.query.shape[2:-1], out.shape[-1])


def _with_heads(x: Tensor) -> Tensor:
    """An operand as [b, s, h, d]; heads of a group that are one and the same as that one."""
    if x.ndim == _ALONE:
        return x.unsqueeze(2)
    if x.ndim != _GROUPED:
        return x
    return x.select(3, 0) if x.stride(3) == 0 else x.flatten(2, 3)


def _with_four_axes(bias: Tensor) -> Tensor:
    """A bias of operands without heads, or with groups of them, as [b, h, s_q, s_kv]."""
    if bias.ndim == _ALONE:
        return bias.unsqueeze(1)
    return bias.flatten(1, 2) if bias.ndim == _GROUPED else bias


def _band(bias: Any, kind: str) -> dict[str, Any]:
    """The arguments of a mask's diagonals, and of the numbers it adds to the scores."""
    if kind not in _KNOWN:
        raise SpecError(f"attn_bias of the class {kind}; allowed: a tensor, {', '.join(_KNOWN)}")
    causal, bottom_right = _KNOWN[kind]
    given: dict[str, Any] = {"mask": "causal" if causal else "none", "bottom_right": bottom_right}
    if hasattr(bias, "window_left"):
        given["window"] = (bias.window_left, bias.window_right)
    elif hasattr(bias, "_window_size"):
        given["window"] = (bias._window_size - 1, 0)
    if hasattr(bias, "_bias"):
        given["bias"] = _with_four_axes(bias._bias)
    return given


def _places(bias: Any) -> tuple[Tensor, Tensor]:
    """Cumulative numbers of the keys of sequences that begin anywhere in their pages, and the row
    in which each of these keys lies."""
    lengths, table = bias.k_seqinfo, bias.block_tables
    starts = lengths.seqstart[: len(table)]
    counts = lengths.seqlen - starts
    tokens = sum(lengths.seqlen_py) - sum(lengths.seqstart_py[: len(table)])
    sequence = torch.arange(len(table), device=table.device)
    sequence = sequence.repeat_interleave(counts, output_size=tokens)
    ends = pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    row = torch.arange(tokens, device=table.device) - (ends[:-1] - starts)[sequence]
    page = table[sequence, row.div(bias.page_size, rounding_mode="floor")].long()
    return ends, page * bias.page_size + row.remainder(bias.page_size)


def _blocks(bias: Any) -> dict[str, Any]:
    """The arguments of sequences in a row, of whose keys parts may be in use, or lie in pages."""
    used = getattr(bias.k_seqinfo, "seqlen", None)
    given: dict[str, Any] = packed("q", bias.q_seqinfo.seqstart, None)
    if hasattr(bias, "block_tables"):
        pages = {"page_table": bias.block_tables, "seqused_kv": used}
        return {**given, **pages, "layout": "paged_kv_thd_bshd_bshd"}
    return {**given, **packed("kv", bias.k_seqinfo.seqstart, used), "layout": "thd"}
