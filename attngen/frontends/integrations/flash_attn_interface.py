"""FlashAttention-3's functions by their names and arguments, on attngen's kernels.

Beside their arguments each takes `s_aux`, float32 or narrower [h], a score of each head that no key
has, and `backend`, as of `attngen.attention`. pack_gqa, sm_margin and scheduler_metadata say how
their kernels run and never what these compute: they are not read. Of qv [.., h, d_v] each takes
the products with v into the scores, whose scale is 1/√(d + d_v) then, if it is None.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import Tensor

from ...call.taking import taking
from ...errors import SpecError
from .flash import (
    EVERYWHERE,
    Cached,
    Window,
    attend,
    attend_cached,
    rotary_of,
    stays_at_start,
    table_of,
    variant,
    with_second_product,
)
from .lengths import packed

__all__ = [
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
]
Returned = Tensor | tuple[Tensor, Tensor | None]
_PACKED_AXES = 5  # of three operands apart


def _returned(operands: tuple[Tensor, ...], call: Any, lengths: dict[str, Any]) -> Returned:
    """The result of a call: the output, or (output, LSE) where it asks for probabilities."""
    given = variant(call) | lengths
    if getattr(call, "qv", None) is not None:
        q, k, v = operands
        operands = (*with_second_product(q, k, v, call.qv), v)
    if getattr(call, "num_splits", 1) > 1:
        given["num_splits"] = call.num_splits
    out, lse = attend(operands, given, call.return_attn_probs)
    return (out, lse) if call.return_attn_probs else out


@dataclass(slots=True, eq=False)
class Dense:
    """Arguments of `flash_attn_func`."""

    q: Tensor
    k: Tensor
    v: Tensor
    softmax_scale: float | None = None
    causal: bool = False
    qv: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    window_size: Window = EVERYWHERE
    attention_chunk: int = 0
    softcap: float = 0.0
    num_splits: int = 1
    pack_gqa: bool | None = None
    deterministic: bool = False
    sm_margin: int = 0
    return_attn_probs: bool = False
    _: KW_ONLY
    s_aux: Tensor | None = None
    backend: str = "auto"


@taking(Dense)
def flash_attn_func(call: Dense) -> Returned:
    """Attention of q [b, s_q, h, d] over k, v [b, s_kv, h_kv, d and d_v]; of FP8 operands with
    descale factors [b, h_kv].

    Returns: the output [b, s_q, h, d_v], with return_attn_probs (output, LSE [b, h, s_q]).
    Raises: SpecError, with every violation at once.
    """
    return _returned((call.q, call.k, call.v), call, {})


@dataclass(slots=True, eq=False)
class QkvPacked:
    """Arguments of `flash_attn_qkvpacked_func`."""

    qkv: Tensor
    softmax_scale: float | None = None
    causal: bool = False
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    window_size: Window = EVERYWHERE
    attention_chunk: int = 0
    softcap: float = 0.0
    deterministic: bool = False
    num_heads_q: int | None = None
    sm_margin: int = 0
    return_attn_probs: bool = False
    _: KW_ONLY
    s_aux: Tensor | None = None
    backend: str = "auto"


@taking(QkvPacked)
def flash_attn_qkvpacked_func(call: QkvPacked) -> Returned:
    """`flash_attn_func` of qkv [b, s, 3, h, d], or [b, s, num_heads_q + 2 · h_kv, d]."""
    if call.qkv.ndim == _PACKED_AXES:
        return _returned((call.qkv,), call, {"layout": "bs3hd"})
    if call.num_heads_q is None:
        raise SpecError("num_heads_q says which heads of qkv [b, s, h + 2 · h_kv, d] are queries'")
    shared = (call.qkv.shape[2] - call.num_heads_q) // 2
    q, k, v = call.qkv.split([call.num_heads_q, shared, shared], 2)
    return _returned((q, k, v), call, {})


@dataclass(slots=True, eq=False)
class Varlen:
    """Arguments of `flash_attn_varlen_func`."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    softmax_scale: float | None = None
    causal: bool = False
    qv: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    window_size: Window = EVERYWHERE
    attention_chunk: int = 0
    softcap: float = 0.0
    num_splits: int = 1
    pack_gqa: bool | None = None
    deterministic: bool = False
    sm_margin: int = 0
    return_attn_probs: bool = False
    _: KW_ONLY
    s_aux: Tensor | None = None
    backend: str = "auto"


@taking(Varlen)
def flash_attn_varlen_func(call: Varlen) -> Returned:
    """Attention of packed q [t_q, h, d] over k, v [t_kv, h_kv, d and d_v]; of each sequence the
    first seqused tokens, [b], take part, and the output of others is 0.

    Returns: the output [t_q, h, d_v], with return_attn_probs (output, LSE [h, t_q]).
    Raises: SpecError, with every violation at once.
    """
    lengths: dict[str, Any] = packed("q", call.cu_seqlens_q, call.seqused_q)
    lengths |= packed("kv", call.cu_seqlens_k, call.seqused_k)
    return _returned((call.q, call.k, call.v), call, {"layout": "thd", **lengths})


@dataclass(slots=True, eq=False)
class WithCache:
    """Arguments of `flash_attn_with_kvcache`."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None = None
    v: Tensor | None = None
    qv: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    cache_seqlens: int | Tensor | None = None
    cache_batch_idx: Tensor | None = None
    cache_leftpad: Tensor | None = None
    page_table: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k_new: Tensor | None = None
    max_seqlen_q: int | None = None
    rotary_seqlens: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Window = EVERYWHERE
    attention_chunk: int = 0
    softcap: float = 0.0
    rotary_interleaved: bool = True
    scheduler_metadata: Tensor | None = None
    num_splits: int = 0
    pack_gqa: bool | None = None
    sm_margin: int = 0
    return_softmax_lse: bool = False
    _: KW_ONLY
    s_aux: Tensor | None = None
    backend: str = "auto"


@taking(WithCache)
def flash_attn_with_kvcache(call: WithCache) -> Returned:
    """Attention over a cache, as flash-attention 2's of the name; queries and new tokens may be
    packed: q [t, h, d] with cu_seqlens_q, k and v [t_new, h_kv, d] with cu_seqlens_k_new.

    Returns: the output, in q's layout, with return_softmax_lse (output, LSE).
    Raises: SpecError, with every violation at once, rotary_seqlens among them.
    """
    if call.rotary_seqlens is not None:
        raise SpecError(
            "rotary_seqlens: new tokens turn by their place in the cache; rotate q and k before "
            "the call where positions are others"
        )
    out, lse = attend_cached(
        Cached(
            *(call.q, call.k_cache, call.v_cache, call.k, call.v, call.cache_seqlens),
            table=table_of(call.page_table, call.cache_batch_idx),
            leftpad=call.cache_leftpad,
            rotary=rotary_of(call, stays_at_start(call)),
            attention=variant(call),
            num_splits=call.num_splits,
            wants_lse=call.return_softmax_lse,
            cu_seqlens_q=call.cu_seqlens_q,
            cu_seqlens_k_new=call.cu_seqlens_k_new,
            qv=call.qv,
        )
    )
    return (out, lse) if call.return_softmax_lse else out
