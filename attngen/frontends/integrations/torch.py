"""Attention as PyTorch spells it: `sdpa`, `replaced_sdpa`, `register_flash`, `varlen_attn`, and
`flex_attention`, which is `attngen`'s."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ... import attention, flex_attention
from ...call.backend import AUTO, asked, check_backend
from ...call.taking import taking
from ...errors import LimitError, SpecError
from .flash_registry import register_flash
from .lengths import packed, paged

__all__ = [
    "flex_attention",
    "register_flash",
    "replaced_sdpa",
    "replacing",
    "sdpa",
    "varlen_attn",
]

log = logging.getLogger("attngen")
Function = Callable[..., Any]
Operands = tuple[Tensor, Tensor, Tensor]
_NAME = "scaled_dot_product_attention"
_RANK = 4
_HEADS, _ROWS = -3, -2  # axes
_said: set[str] = set()


@dataclass(slots=True, eq=False)
class Sdpa:
    """Arguments of the function."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    _: KW_ONLY
    backend: str = "auto"


@taking(Sdpa)
def sdpa(call: Sdpa) -> Tensor:
    """Attention with the signature of `torch.nn.functional.scaled_dot_product_attention`, and what
    it means there.

    Four things are attngen's: a row that sees no key is zero, dropout's probability is rounded to
    1/256, a float mask is rounded to the dtype of the query, and axes in front broadcast beside no
    keys or queries, too, where PyTorch's output has those of the query.

    Args:
        query: [.., h, s_q, d], of two to any number of axes; those in front broadcast.
        key, value: [.., h_kv, s_kv, d and d_v].
        attn_mask: a broadcast of [.., h, s_q, s_kv]: bool, True takes part; floats of any dtype are
            added to the scores and have a gradient; or a CausalBias.
        dropout_p: probability in 0..1 that a weight is dropped, whether or not a model trains.
        is_causal: the first query sees the first key; not beside attn_mask.
        scale: of the scores; None is 1/√d.
        enable_gqa: whether groups of query heads may share a head of key and value.
        backend: as of `attngen.attention`.

    Returns: [.., h, s_q, d_v] in the query's dtype, positions before heads in memory where the
        query's are.

    Raises:
        SpecError: a ValueError, where the arguments do not agree, or the backend that was named
            refuses them.
    """
    given = call.query, call.key, call.value
    if call.query.is_nested:
        return _attend(call, _swapped(given), call.attn_mask, "thd").transpose(1, 2)
    if call.is_causal and call.attn_mask is not None:
        raise SpecError("is_causal=True and attn_mask are both masks; give one of them")
    rank = max([x.ndim for x in given])
    front, operands = _folded(given, rank, call.enable_gqa)
    mask = call.attn_mask
    if mask is not None and type(mask).__name__ != "CausalBias":
        mask = _folded_mask(mask, front)
    q, _, _ = operands
    if q.stride(_HEADS) >= q.stride(_ROWS):
        out = _attend(call, operands, mask, "bhsd")
    else:
        out = _attend(call, _swapped(operands), mask, "bshd").transpose(1, 2)
    if rank == _RANK:
        return out
    return out.unflatten(0, front) if rank > _RANK else out.reshape(out.shape[_RANK - rank :])


def _swapped(operands: Operands) -> Operands:
    """The operands with heads and positions in each other's place."""
    q, k, v = operands
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _folded(given: Operands, rank: int, grouped: bool) -> tuple[tuple[int, ...], Operands]:
    """The axes in front of the heads, broadcast, and the operands [b, h, s, d] with these in one.

    grouped: whether query heads share those of key and value, of which there may be fewer.

    Raises: SpecError where the sizes do not broadcast.
    """
    if min([x.ndim for x in given]) < -_ROWS:
        raise SpecError(f"query, key and value have two axes or more; got {_shapes(given)}")
    q, k, v = given
    if q.ndim == k.ndim == v.ndim == _RANK:  # as of nearly all calls, which make no views here
        (b, heads, *_), (_, of_keys, *_) = q.shape, k.shape
        alike = k.shape[:_ROWS] == v.shape[:_ROWS] and k.shape[0] == b
        if alike and (grouped or heads == of_keys):
            return (b,), given
    q, k, v = whole = tuple([x[(None,) * (max(rank, _RANK) - x.ndim)] for x in given])
    alike = k.shape[:_ROWS] == v.shape[:_ROWS] and q.shape[:_HEADS] == k.shape[:_HEADS]
    if alike and rank <= _RANK and (grouped or q.shape[_HEADS] == k.shape[_HEADS]):
        return tuple(q.shape[:_HEADS]), (q, k, v)
    try:
        front = torch.broadcast_shapes(*[x.shape[:_HEADS] for x in whole])
        q, k, v = _with_heads(whole, grouped)
    except RuntimeError as error:
        raise SpecError(f"sizes that do not broadcast: {_shapes(given)}") from error
    q, k, v = (x.expand(*front, -1, -1, -1).flatten(0, _HEADS - 1) for x in (q, k, v))
    return tuple(front), (q, k, v)


def _with_heads(operands: tuple[Tensor, ...], grouped: bool) -> Operands:
    """The operands with as many heads as a call takes: those of key and value the same, and query's
    a multiple. Raises: SpecError where only groups would fit; RuntimeError where nothing does."""
    q, k, v = operands
    heads = [x.shape[_HEADS] for x in operands]
    _, *of_keys = heads
    if not grouped:
        try:
            (wanted,) = torch.broadcast_shapes(*[(n,) for n in heads])
        except RuntimeError:
            raise SpecError(
                f"query, key and value have {heads} heads; pass enable_gqa=True where groups share"
            ) from None
        q = q.expand(*q.shape[:_HEADS], wanted, -1, -1)
        if len({*of_keys}) > 1:
            k, v = (x.expand(*x.shape[:_HEADS], wanted, -1, -1) for x in (k, v))
    elif len({*of_keys}) > 1:
        k, v = (x.repeat_interleave(q.shape[_HEADS] // x.shape[_HEADS], _HEADS) for x in (k, v))
    return q, k, v


def _folded_mask(mask: Tensor, front: tuple[int, ...]) -> Tensor:
    """A mask that broadcasts against [*front, h, s_q, s_kv] as one that does against four axes."""
    whole = mask[(None,) * (len(front) - _HEADS - mask.ndim)]
    if len(front) == 1:
        return whole
    sizes = {*whole.shape[:_HEADS]}
    spread = whole if sizes == {1} else whole.expand(*front, -1, -1, -1)
    return spread.flatten(0, _HEADS - 1)


def _shapes(tensors: Operands) -> list[list[int]]:
    return [[*x.shape] for x in tensors]


def _attend(call: Sdpa, operands: Operands, mask: Tensor | None, layout: str) -> Tensor:
    """The output of operands of this layout."""
    given: dict[str, Any] = {}
    if mask is not None:
        given["bias" if mask.is_floating_point() else "attn_mask"] = mask
    if call.dropout_p > 0:
        given |= {"dropout_p": call.dropout_p, "return_rng_state": True}
    found: Tensor | tuple[Tensor, Any] = attention(
        *operands,
        layout=layout,
        mask="causal" if call.is_causal else "none",
        softmax_scale=call.scale,
        backend=call.backend,
        **given,
    )
    if not isinstance(found, tuple):
        return found
    out, _ = found
    return out


@contextmanager
def replaced_sdpa(backend: str = "auto") -> Iterator[None]:
    """Have PyTorch's `scaled_dot_product_attention` be `sdpa` inside, for all threads.

    It is replaced in `torch.nn.functional`, where `nn.MultiheadAttention` and most libraries look,
    and in each loaded module that has imported it by its name.

    backend: auto is what `attngen.set_backend` has chosen, else leaves calls that no kernel serves
        to PyTorch's own function, with the reason logged once; cuda and reference are those of
        `attngen.attention`, for every call.

    Raises: SpecError where there is no backend of that name.
    """
    check_backend(backend)
    own = getattr(functional, _NAME)

    def attend(*given: Any, **named: Any) -> Tensor:
        if (chosen := asked(backend)) != AUTO:
            return sdpa(*given, **named, backend=chosen)
        try:
            return sdpa(*given, **named, backend="cuda")
        except (SpecError, LimitError) as refusal:
            _log_once("; ".join(refusal.reasons))
        return _by_pytorch(own, Sdpa(*given, **named))

    with replacing(attend):
        yield


@contextmanager
def replacing(function: Function) -> Iterator[None]:
    """Have another function be PyTorch's `scaled_dot_product_attention` inside, in each loaded
    module of Python that has it under its name; torch.compile looks for the function itself in that
    of C++."""
    own = getattr(functional, _NAME)
    loaded = [each for each in [*sys.modules.values()] if isinstance(each, ModuleType)]
    known = [each for each in loaded if vars(each).get(_NAME) is own]
    modules = [each for each in known if "._C" not in each.__name__]
    try:
        for module in modules:
            setattr(module, _NAME, function)
        yield
    finally:
        for module in modules:
            setattr(module, _NAME, own)


def _by_pytorch(own: Function, call: Sdpa) -> Tensor:
    """The output of PyTorch's own function; a CausalBias, whose class would look for that function
    where it is replaced, is the mask that it means."""
    mask: Any = call.attn_mask
    if type(mask).__name__ == "CausalBias":
        rows, keys = mask.seq_len_q, mask.seq_len_kv
        shift = keys - rows if mask.variant.name == "LOWER_RIGHT" else 0
        every = torch.ones(rows, keys, dtype=torch.bool, device=call.query.device)
        mask = every.tril(shift)
    found: Tensor = own(
        *(call.query, call.key, call.value, mask, call.dropout_p, call.is_causal),
        scale=call.scale,
        enable_gqa=call.enable_gqa,
    )
    return found


def _log_once(reason: str) -> None:
    if not torch.compiler.is_compiling() and reason not in _said:
        _said.add(reason)
        log.warning("PyTorch computes an attention that it was replaced in: %s", reason)


@dataclass(slots=True, eq=False)
class Varlen:
    """Arguments of the function."""

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seq_q: Tensor
    cu_seq_k: Tensor | None
    max_q: int
    max_k: int
    _: KW_ONLY
    return_aux: Any = None
    scale: float | None = None
    window_size: tuple[int, int] = (-1, -1)
    enable_gqa: bool = False
    seqused_k: Tensor | None = None
    block_table: Tensor | None = None
    num_splits: int | None = None
    backend: str = "auto"


@taking(Varlen)
def varlen_attn(call: Varlen) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over packed tokens with the signature of `torch.nn.attention.varlen.varlen_attn`,
    and what it means there.

    Args:
        query: [t_q, h, d].
        key, value: [t_kv, h_kv, d and d_v]; with a block_table pages [n, page_size, h_kv, d].
        cu_seq_q, cu_seq_k: cumulative lengths, int32 or int64 [b + 1].
        max_q, max_k: longest lengths, which change nothing.
        return_aux: with `lse` true the LSE, float32 [h, t_q], is returned, too.
        scale: of the scores; None is 1/√d.
        window_size: keys before and behind each query's own that it sees, −1 for all; the last
            query's own is the last key. (−1, 0) is a causal mask.
        enable_gqa: whether groups of query heads share a head of key and value.
        seqused_k: tokens in use of each sequence's keys, [b].
        block_table: pages of each sequence, [b, n], beside seqused_k.
        num_splits: as of `attngen.attention`.
        backend: as of `attngen.attention`.

    Raises:
        SpecError: a ValueError, with every violation at once.
    """
    heads, of_keys = call.query.shape[1], call.key.shape[-2]
    if heads != of_keys and not call.enable_gqa:
        raise SpecError(f"{heads} query and {of_keys} key heads need enable_gqa=True")
    given = paged(call.block_table, call.seqused_k) | packed("q", call.cu_seq_q, None)
    if call.block_table is None:
        if call.cu_seq_k is None:
            raise SpecError("cu_seq_k says where keys without a block_table lie; got None")
        given |= packed("kv", call.cu_seq_k, call.seqused_k)
    wants_lse = call.return_aux is not None and call.return_aux.lse
    found: Tensor | tuple[Tensor, Any] = attention(
        *(call.query, call.key, call.value),
        window=call.window_size,
        bottom_right=True,
        softmax_scale=call.scale,
        num_splits=call.num_splits,
        return_lse=wants_lse,
        backend=call.backend,
        **given,
    )
    if not isinstance(found, tuple):
        return found
    out, aux = found
    return out, aux.lse
