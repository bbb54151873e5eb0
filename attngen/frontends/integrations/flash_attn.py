"""flash-attention 2's functions by their names and arguments, on attngen's kernels.

What they return is as theirs, but for two things: a row that sees no key has an LSE of −∞, and
dropout's probability is rounded to 1/256 and draws other numbers, of which S_dmask would be the
record: it is None. Each takes `backend`, as of `attngen.attention`, beside their arguments.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import Tensor

from ...call.taking import taking
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
)
from .lengths import packed, paged

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
__version__ = "2.8"  # of the library whose arguments these are, as code that calls it asks
Returned = Tensor | tuple[Tensor, Tensor | None, None]


def _returned(operands: tuple[Tensor, ...], call: Any, lengths: dict[str, Any]) -> Returned:
    """The result of a call: the output, or (output, LSE, None) where it asks for probabilities."""
    out, lse = attend(operands, variant(call) | lengths, call.return_attn_probs)
    return (out, lse, None) if call.return_attn_probs else out


@dataclass(slots=True, eq=False)
class Dense:
    """Arguments of `flash_attn_func`."""

    q: Tensor
    k: Tensor
    v: Tensor
    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Window = EVERYWHERE
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    return_attn_probs: bool = False
    _: KW_ONLY
    backend: str = "auto"


@taking(Dense)
def flash_attn_func(call: Dense) -> Returned:
    """Attention of q [b, s_q, h, d] over k, v [b, s_kv, h_kv, d and d_v].

    Returns: the output [b, s_q, h, d_v], with return_attn_probs (output, LSE [b, h, s_q], None).
    Raises: SpecError, with every violation at once.
    """
    return _returned((call.q, call.k, call.v), call, {})


@dataclass(slots=True, eq=False)
class KvPacked:
    """Arguments of `flash_attn_kvpacked_func`."""

    q: Tensor
    kv: Tensor
    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Window = EVERYWHERE
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    return_attn_probs: bool = False
    _: KW_ONLY
    backend: str = "auto"


@taking(KvPacked)
def flash_attn_kvpacked_func(call: KvPacked) -> Returned:
    """`flash_attn_func` of kv [b, s_kv, 2, h_kv, d], whose gradient comes packed."""
    return _returned((call.q, call.kv), call, {"layout": "bshd_bs2hd"})


@dataclass(slots=True, eq=False)
class QkvPacked:
    """Arguments of `flash_attn_qkvpacked_func`."""

    qkv: Tensor
    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Window = EVERYWHERE
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    return_attn_probs: bool = False
    _: KW_ONLY
    backend: str = "auto"


@taking(QkvPacked)
def flash_attn_qkvpacked_func(call: QkvPacked) -> Returned:
    """`flash_attn_func` of qkv [b, s, 3, h, d], whose gradient comes packed."""
    return _returned((call.qkv,), call, {"layout": "bs3hd"})


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
    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Window = EVERYWHERE
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    return_attn_probs: bool = False
    block_table: Tensor | None = None
    _: KW_ONLY
    backend: str = "auto"


@taking(Varlen)
def flash_attn_varlen_func(call: Varlen) -> Returned:
    """Attention of packed q [t_q, h, d] over k, v [t_kv, h_kv, d and d_v], or, with a block_table
    [b, n], over pages [blocks, page_size, h_kv, d]; cu_seqlens are int32 or int64 [b + 1].

    Returns: the output [t_q, h, d_v], with return_attn_probs (output, LSE [h, t_q], None).
    Raises: SpecError, with every violation at once.
    """
    lengths = packed("q", call.cu_seqlens_q, None)
    lengths |= paged(call.block_table, call.cu_seqlens_k.diff())
    if call.block_table is None:
        lengths |= packed("kv", call.cu_seqlens_k, None)
    return _returned((call.q, call.k, call.v), call, lengths)


@dataclass(slots=True, eq=False)
class VarlenKvPacked:
    """Arguments of `flash_attn_varlen_kvpacked_func`."""

    q: Tensor
    kv: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Window = EVERYWHERE
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    return_attn_probs: bool = False
    _: KW_ONLY
    backend: str = "auto"


@taking(VarlenKvPacked)
def flash_attn_varlen_kvpacked_func(call: VarlenKvPacked) -> Returned:
    """`flash_attn_varlen_func` of kv [t_kv, 2, h_kv, d], whose gradient comes packed."""
    lengths = packed("q", call.cu_seqlens_q, None) | packed("kv", call.cu_seqlens_k, None)
    return _returned((call.q, call.kv), call, {"layout": "thd_t2hd", **lengths})


@dataclass(slots=True, eq=False)
class VarlenQkvPacked:
    """Arguments of `flash_attn_varlen_qkvpacked_func`."""

    qkv: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Window = EVERYWHERE
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    return_attn_probs: bool = False
    _: KW_ONLY
    backend: str = "auto"


@taking(VarlenQkvPacked)
def flash_attn_varlen_qkvpacked_func(call: VarlenQkvPacked) -> Returned:
    """`flash_attn_varlen_func` of qkv [t, 3, h, d], whose gradient comes packed."""
    return _returned((call.qkv,), call, {"layout": "t3hd", **packed("q", call.cu_seqlens, None)})


@dataclass(slots=True, eq=False)
class WithCache:
    """Arguments of `flash_attn_with_kvcache`."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None = None
    v: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    cache_seqlens: int | Tensor | None = None
    cache_batch_idx: Tensor | None = None
    cache_leftpad: Tensor | None = None
    block_table: Tensor | None = None
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Window = EVERYWHERE
    softcap: float = 0.0
    rotary_interleaved: bool = True
    alibi_slopes: Tensor | None = None
    num_splits: int = 0
    return_softmax_lse: bool = False
    _: KW_ONLY
    backend: str = "auto"


@taking(WithCache)
def flash_attn_with_kvcache(call: WithCache) -> Tensor | tuple[Tensor, Tensor | None]:
    """Attention of q [b, s, h, d] over a cache [b, s_cache, h_kv, d], or over its pages
    [blocks, page_size, h_kv, d], into which new k and v [b, s_new, h_kv, d] are written before.

    cache_seqlens counts the tokens that are in the cache already, cache_batch_idx says which row of
    it each sequence has, and cache_leftpad in which column it begins; a cache that is looked up or
    paged begins at its first. Rotation needs k and v, and no cache_leftpad. No gradients.

    Returns: the output [b, s, h, d_v], with return_softmax_lse (output, LSE [b, h, s]).
    Raises: SpecError, with every violation at once.
    """
    out, lse = attend_cached(
        Cached(
            *(call.q, call.k_cache, call.v_cache, call.k, call.v, call.cache_seqlens),
            table=table_of(call.block_table, call.cache_batch_idx),
            leftpad=call.cache_leftpad,
            rotary=rotary_of(call, stays_at_start(call)),
            attention=variant(call),
            num_splits=call.num_splits,
            wants_lse=call.return_softmax_lse,
        )
    )
    return (out, lse) if call.return_softmax_lse else out
