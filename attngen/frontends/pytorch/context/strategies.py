"""Strategies of attention over a group: who sends what, chosen by the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ....call.context.checks import AXES
from ....call.context.order import AnyOrder, Order, order_of
from ....errors import SpecError
from ....io.text import suggestion
from ....reference.dropout import draw_rng_state
from ....results import AttentionAux
from ..attention import attention as attend
from ..casts import autocast, without_autocast
from .calls import (
    BANDS,
    LENGTHS,
    NUMBERS,
    Asked,
    Ranks,
    asked_of,
    bias_of,
    context_call,
    features_of,
    packed_of,
    sink_of,
    slopes_of,
)
from .choice import COMMS, Comm, against_heads, chosen, ends_at_keys
from .function import ContextAttention
from .heads import Exchange, Exchanged, Tokens, outer_order
from .kept import numbers_on
from .storage import stored_of

_attend: Callable[..., tuple[Tensor, Tensor]] = ContextAttention.apply
_exchanged: Callable[..., Tensor] = Exchanged.apply


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    comm: Comm = "p2p",
    order: AnyOrder = "dual_chunk",
    reduce_dtype: torch.dtype = torch.float32,
    **arguments: Any,
) -> Tensor | tuple[Tensor, AttentionAux]:
    """Attention of this rank's queries over the keys of all, with its gradients.

    q, k, v: what the rank holds of each sequence in that order (`shard`), [b, s / n, h, d] of n
    ranks in the default layout, [t / n, h, d] in `thd`, of one dtype of 16 bits or more. group: a
    process group, or a mesh of one axis; None for all ranks; for a2a+p2p a pair, (inner, outer).
    comm: p2p, keys come from one rank after another, those alone that are needed; all_gather, all
    at once; a2a, ranks exchange positions for heads; a2a+p2p, that inside the inner group and p2p
    over the outer one; auto, what was fastest for such calls on two H200s, as
    docs/guide/context-parallel.md has it. order: dual_chunk, two chunks from both ends; contiguous;
    striped, or `("striped", n)` for stripes of n positions. reduce_dtype: of gradients in messages,
    beside operands of 16 bits.

    arguments: those of `attngen.attention`, of which others are refused by name with a list of
    those that are served: not `out`, pages, functions and fragments. cu_seqlens_… are of
    the whole, seqused_… of whole sequences, and plans need them on the host: those of a GPU are
    waited for. bias and attn_mask have the rank's queries and all keys, [b, h, s_q / n, s_kv].
    rng_state is that of the group's first rank, drawn there unless given; what is dropped does not
    depend on how many ranks there are. Gradients of sink and bias are those by the rank's queries.
    Under torch.autocast float32 operands are cast to its dtype, once.

    Returns: the output, q's shape with d_v; with return_lse or return_rng_state a pair with an
    AttentionAux, its LSE [b, h, s_q / n], of packed tokens [h, t / n].

    Raises: SpecError, which names the strategy that can where one cannot; as `attngen.attention`.
    """
    if comm not in COMMS:
        meant = suggestion(comm, COMMS)
        raise SpecError(f"comm={comm!r}; known: {', '.join(COMMS)}{meant}")
    paired = isinstance(group, (tuple, list))
    if paired != (comm == "a2a+p2p"):
        raise SpecError("comm='a2a+p2p' takes group=(inner, outer), and no other comm does")
    inner, outer = map(Ranks.of, group) if paired else (None, Ranks.of(group))
    count = outer.size * (1 if inner is None else inner.size)
    whole_order = order_of(order, count)
    with without_autocast(q.device.type) as was_on:
        if was_on:
            q, k, v = autocast(q, k, v)
        asked = asked_of(q, k, v, arguments, count)
        return _attend_spread(asked, comm, whole_order, inner, outer, reduce_dtype)


def _attend_spread(
    asked: Asked,
    comm: Comm,
    order: Order,
    inner: Ranks | None,
    outer: Ranks,
    reduce_dtype: torch.dtype,
) -> Tensor | tuple[Tensor, AttentionAux]:
    """The call by a strategy. Raises: SpecError, which names the strategy that can."""
    if comm == "auto":
        comm = chosen(asked, order, outer.size)
    if comm == "a2a":
        if reasons := against_heads(asked, outer.size):
            raise SpecError(reasons)
        inner, outer = outer, Ranks(None, 1, 0)
    if inner is not None and comm == "a2a+p2p" and (found := against_heads(asked, inner.size)):
        raise SpecError(found)
    state = _rng_state(asked, [x for x in (outer, inner) if x is not None and x.size > 1])
    if inner is None:
        gathers = comm == "all_gather"
        out, lse = _over_positions(asked, order, outer, gathers, state, 0, reduce_dtype)
    else:
        out, lse = _over_heads(asked, order, inner, outer, state, reduce_dtype)
    return _as_asked(asked, out, lse, state)


def _over_positions(
    asked: Asked,
    order: Order,
    ranks: Ranks,
    gathers: bool,
    state: Tensor | None,
    first_head: int,
    reduce_dtype: torch.dtype,
    heads: int = 0,
) -> tuple[Tensor, Tensor]:
    """Output [b, t, h, d] and LSE [b, h, t] of ranks that hold the same heads. heads: of all, where
    these hold some."""
    if not asked.packed and (together := packed_of(asked)) is not None:
        batch = len(asked.q)
        out, lse = _over_positions(
            together, order, ranks, gathers, state, first_head, reduce_dtype, heads
        )
        out = out.unflatten(1, (batch, -1)).squeeze(0)
        return out, lse.unflatten(2, (batch, -1)).squeeze(0).transpose(0, 1)
    stored = stored_of(asked, order, ranks)
    features = features_of(asked, state, first_head, heads or asked.q.shape[2], stored)
    call = context_call(asked, order, ranks, gathers, features, reduce_dtype)
    call = replace(call, stored=stored)
    sink = sink_of(asked, first_head)
    return _attend(call, asked.q, asked.k, asked.v, sink, bias_of(asked))


def _over_heads(
    asked: Asked,
    order: Order,
    inner: Ranks,
    outer: Ranks,
    state: Tensor | None,
    reduce_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Output and LSE, by way of an exchange of positions for heads."""
    device, above = asked.q.device, outer_order(order, inner.size)
    if outer.size == 1:  # which hold whole sequences then, in the order of their positions
        above = Order("contiguous", 1)
    first = outer.rank * inner.size
    of_q, of_kv = (
        Exchange.between(
            inner.group,
            Tokens(order, first, inner.size, above, outer.rank, tuple(rooms)),
            device,
        )
        for rooms in asked.rooms
    )
    q, k, v = (
        _exchanged(exchange.to_heads, exchange.to_positions, x)
        for exchange, x in ((of_q, asked.q), (of_kv, asked.k), (of_kv, asked.v))
    )
    heads = asked.q.shape[2]
    own = replace(asked, q=q, k=k, v=v)
    first_head = inner.rank * q.shape[2]
    if outer.size == 1:
        out, lse = _of_whole(own, state, first_head, heads)
    else:
        out, lse = _over_positions(own, above, outer, False, state, first_head, reduce_dtype, heads)
    back = partial(_exchanged, of_q.to_positions, of_q.to_heads)
    lse = back(lse.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)
    return back(out), lse


def _of_whole(
    asked: Asked, state: Tensor | None, first_head: int, heads: int
) -> tuple[Tensor, Tensor]:
    """Output and LSE of whole sequences of some heads, by one call."""
    given = dict(asked.given)
    names = (*BANDS, *NUMBERS, *LENGTHS, "softmax", "backend", "deterministic")
    found = {name: given[name] for name in names if name in given}
    device = asked.q.device
    found |= {name: numbers_on(found[name], device) for name in LENGTHS if name in found}
    if found.get("bias_type") == "alibi":
        del found["bias_type"]
    if given.get("softmax") == "learnable":
        found["sink"] = sink_of(asked, first_head)
    if (slopes := slopes_of(asked, first_head, heads)) is not None:
        found["alibi_slopes"] = slopes
    q, k, v = asked.q, asked.k, asked.v
    if asked.packed:
        found["layout"], q, k, v = "thd", q.squeeze(0), k.squeeze(0), v.squeeze(0)
    if asked.dropout_p > 0:
        found |= {"rng_state": state, "positions": _positions_of(asked, first_head)}
        found.pop("bottom_right", None)
        if "mask" in found:
            found["mask"] = found["mask"].removesuffix("_bottom_right")
    out, aux = attend(q, k, v, **found, return_lse=True)
    lse = aux.lse
    assert lse is not None
    return (out[None], lse[None]) if asked.packed else (out, lse)


def _positions_of(asked: Asked, first_head: int) -> tuple[int, ...]:
    """The positions of whole sequences of some heads."""
    first, *_ = asked.lengths
    return 0, 0, first.kv - first.q if ends_at_keys(asked) else 0, first_head


def _rng_state(asked: Asked, groups: Sequence[Ranks]) -> Tensor | None:
    """The state of dropout that all ranks have, None without dropout."""
    if not asked.dropout_p > 0:
        return None
    given = asked.given.get("rng_state")
    state = draw_rng_state(asked.q.device) if given is None else given.clone()
    for each in groups:
        dist.broadcast(state, dist.get_global_rank(each.group, 0), group=each.group)
    return state


def _as_asked(
    asked: Asked, out: Tensor, lse: Tensor, state: Tensor | None
) -> Tensor | tuple[Tensor, AttentionAux]:
    """The results in the call's layout."""
    if asked.packed:
        out, lse = out.squeeze(0), lse.squeeze(0)
    else:
        out = out.permute(AXES[asked.given.get("layout", "bshd")])
    wants_lse, wants_state = (
        bool(asked.given.get(name)) for name in ("return_lse", "return_rng_state")
    )
    if not (wants_lse or wants_state):
        return out
    return out, AttentionAux(lse=lse if wants_lse else None, rng_state=state)
