"""Calls that flash-attention's functions of every version become."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import append_kv, attention
from ...call.append import AppendCall, rotation_violations
from ...errors import SpecError
from ...reference import append as definition
from ...reference.fp8 import is_fp8

Window = tuple[int, int]
EVERYWHERE: Window = (-1, -1)
Found = Tensor | tuple[Tensor, Any]


def variant(call: Any) -> dict[str, Any]:
    """The arguments of `attention` for how queries see keys, and for what becomes of scores.

    call: has causal, window_size, softmax_scale and softcap, and may have what only one version of
    the library takes. Diagonals end where the last query sees the last key.
    """
    masks = ["causal"] if call.causal else []
    given: dict[str, Any] = {}
    if chunk := getattr(call, "attention_chunk", 0):
        masks.append("chunked")
        given["chunked"] = chunk
    if (sink := getattr(call, "s_aux", None)) is not None:
        given |= {"softmax": "learnable", "sink": sink}
    if (slopes := getattr(call, "alibi_slopes", None)) is not None:
        given["alibi_slopes"] = slopes
    if p := getattr(call, "dropout_p", 0.0):
        given["dropout_p"] = p
    if getattr(call, "deterministic", False):
        given["deterministic"] = True
    for name in "qkv":
        if (factor := getattr(call, f"{name}_descale", None)) is not None:
            given[f"descale_{name}"] = factor
    return {
        **given,
        "mask": "+".join(masks) or "none",
        "window": call.window_size,
        "bottom_right": True,
        "softmax_scale": call.softmax_scale,
        "softcap": call.softcap,
        "backend": call.backend,
    }


def with_second_product(q: Tensor, k: Tensor, v: Tensor, qv: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys whose products are q · k + qv · v, [.., d + d_v]. Columns of k and v that
    are neighbours in memory are read where they lie; others are copied.

    Raises: SpecError where qv is no query of v, or operands are of 8 bits.
    """
    if any(is_fp8(x.dtype) for x in (q, k, v, qv)):
        raise SpecError("qv beside 8 bits: each operand has a factor of its own; pass 16 bits")
    if qv.shape != (*q.shape[:-1], v.shape[-1]):
        wanted = [*q.shape[:-1], v.shape[-1]]
        raise SpecError(f"qv has v's columns for each query, {wanted}; got {[*qv.shape]}")
    for first, second, queries in ((k, v, (q, qv)), (v, k, (qv, q))):
        if _are_neighbours(first, second):
            size = (*k.shape[:-1], k.shape[-1] + v.shape[-1])
            return torch.cat(queries, -1), first.as_strided(size, first.stride())
    return torch.cat((q, qv), -1), torch.cat((k, v), -1)


def _are_neighbours(first: Tensor, second: Tensor) -> bool:
    """Whether the columns of the second follow those of the first in memory, which nobody learns
    from."""
    learns = torch.is_grad_enabled() and (first.requires_grad or second.requires_grad)
    if learns or torch.compiler.is_compiling():
        return False
    alike = first.shape[:-1] == second.shape[:-1] and first.stride() == second.stride()
    behind = first.data_ptr() + first.shape[-1] * first.element_size() == second.data_ptr()
    same = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    return alike and behind and same and first.stride(-1) == 1 and first.dtype == second.dtype


def attend(
    operands: tuple[Tensor, ...], given: dict[str, Any], wants_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """The output of a call, and its LSE where it is wanted, float32 [b, h, s] or [h, t]."""
    drops = given.get("dropout_p", 0) > 0
    found: Found = attention(*operands, **given, return_lse=wants_lse, return_rng_state=drops)
    if not isinstance(found, tuple):
        return found, None
    out, aux = found
    return out, aux.lse


@dataclass(slots=True, eq=False)
class Cached:
    """A call that reads a cache, behind which it may write new keys and values before.

    lengths: tokens of each sequence that are in the cache already; table: pages, or the one row of
    the cache, of each sequence, [b, n]; leftpad: the row in which each begins; cu_seqlens_q and
    cu_seqlens_k_new: of packed queries and new keys; attention: arguments of `attention`.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    lengths: int | Tensor | None
    table: Tensor | None
    leftpad: Tensor | None
    rotary: dict[str, Any]
    attention: dict[str, Any]
    num_splits: int
    wants_lse: bool
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k_new: Tensor | None = None
    qv: Tensor | None = None

    @property
    def sequences(self) -> int:
        """Sequences of the call."""
        return len(self.q if self.cu_seqlens_q is None else self.cu_seqlens_q[1:])


def table_of(pages: Tensor | None, rows: Tensor | None) -> Tensor | None:
    """The table of a cache's pages, or, of one whose sequences are looked up, of its rows.

    Raises: SpecError where both are given.
    """
    if pages is not None and rows is not None:
        raise SpecError("cache_batch_idx looks up rows of a cache, of which pages have none")
    return pages if rows is None else rows.to(torch.int32)[:, None]


def attend_cached(call: Cached) -> tuple[Tensor, Tensor | None]:
    """The output of a call that reads a cache, and its LSE where it is wanted.

    Raises: SpecError where its arguments do not go together.
    """
    if reasons := _violations(call):
        raise SpecError(reasons)
    q, used = call.q, call.lengths
    if isinstance(used, int):
        used = torch.full((call.sequences,), used, dtype=torch.int32, device=q.device)
    if call.k is not None and used is not None:
        q, used = _appended(call, used.to(torch.int32))
    given = dict(call.attention)
    if call.num_splits:
        given["num_splits"] = call.num_splits
    axes = "bshd" if call.cu_seqlens_q is None else "thd"
    given["layout"] = f"{axes}_bshd_bshd"
    if call.table is not None:
        given |= {"layout": f"paged_kv_{axes}_bshd_bshd", "page_table": call.table}
        if used is None:
            rows = call.k_cache.shape[1] * call.table.shape[1]
            used = torch.full((call.sequences,), rows, dtype=torch.int32, device=q.device)
    if call.cu_seqlens_q is not None:
        given["cu_seqlens_q"] = call.cu_seqlens_q
    given |= {"seqused_kv": used, "seqstart_kv": call.leftpad}
    keys = call.k_cache
    if call.qv is not None:
        q, keys = with_second_product(q, keys, call.v_cache, call.qv)
    return attend((q, keys, call.v_cache), given, call.wants_lse)


def _appended(call: Cached, before: Tensor) -> tuple[Tensor, Tensor]:
    """Write a call's new keys and values behind those that are there; return its queries, rotated
    where the call rotates, and the tokens of each sequence with the new ones."""
    packed, q = call.cu_seqlens_k_new, call.q
    if packed is not None:
        packed = packed.to(torch.int32)
    together = bool(call.rotary) and _lie_alike(call)
    if call.rotary and not together:
        q = _turned_alone(call, before)
    turned = append_kv(
        *(call.k_cache, call.v_cache, call.k, call.v),
        lengths=before,
        layout="bshd" if packed is None else "thd",
        cu_seqlens=packed,
        page_table=None if call.table is None else call.table.to(torch.int32),
        q=q if together else None,
        backend=call.attention["backend"],
        **call.rotary,
    )
    assert call.k is not None  # the caller's condition
    new = call.k.shape[1] if packed is None else packed.diff()
    return q if turned is None else turned, before + new


def _lie_alike(call: Cached) -> bool:
    """Whether each query is beside a new key, so that one kernel turns both. Lengths in two tensors
    may differ, which nobody waits for."""
    ends, of_keys, k = call.cu_seqlens_q, call.cu_seqlens_k_new, call.k
    assert k is not None  # the caller's condition
    if ends is None or of_keys is None:
        return ends is of_keys and call.q.shape[:2] == k.shape[:2]
    return ends is of_keys and len(call.q) == len(k)


def _turned_alone(call: Cached, before: Tensor) -> Tensor:
    """The queries of a call whose new keys are others in number, rotated from where the first of
    these goes."""
    ends = None if call.cu_seqlens_q is None else call.cu_seqlens_q.to(torch.int32)
    queries = AppendCall(
        *(call.k_cache, call.v_cache, call.q, call.q),
        lengths=before,
        layout="bshd" if ends is None else "thd",
        cu_seqlens=ends,
        q=call.q,
        **call.rotary,
    )
    if reasons := [*rotation_violations(queries)]:
        raise SpecError(reasons)
    with torch.no_grad():
        return definition.turned(queries, definition.tokens_of(queries))


def _violations(call: Cached) -> list[str]:
    found = []
    if (call.k is None) != (call.v is None):
        found.append("k and v, the new tokens, come together")
    if call.k is not None and call.lengths is None:
        found.append("cache_seqlens says behind which tokens new ones go; got None")
    if call.rotary and call.k is None:
        found.append("rotary_cos turns new keys and queries; pass k and v with it")
    if call.leftpad is not None and call.table is not None:
        found.append(
            "cache_leftpad belongs to a dense cache, one row a sequence; with pages or "
            "cache_batch_idx begin at the first row"
        )
    if call.leftpad is not None and call.cu_seqlens_q is not None:
        found.append("cache_leftpad goes with queries [b, s, h, d]; pass no cu_seqlens_q")
    if call.leftpad is not None and call.rotary:
        found.append(
            "rotary_cos turns by the row in the cache, with cache_leftpad not by the position; "
            "rotate q and k before the call"
        )
    return found


def rotary_of(call: Any, at_start: bool) -> dict[str, Any]:
    """How `append_kv` is to rotate, nothing where the call has no angles. at_start: whether all
    queries have the position of their sequence's first new token."""
    if call.rotary_cos is None:
        return {}
    return {
        "rotary_cos": call.rotary_cos,
        "rotary_sin": call.rotary_sin,
        "rotary_interleaved": call.rotary_interleaved,
        "rotary_at_start": at_start,
    }


def stays_at_start(call: Any) -> bool:
    """Whether a call's queries are all at the position of the first new token: without a mask."""
    chunked = getattr(call, "attention_chunk", 0)
    return not (call.causal or tuple(call.window_size) != EVERYWHERE or chunked)
