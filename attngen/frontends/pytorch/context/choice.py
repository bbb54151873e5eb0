"""Which strategies serve a call over a group, and which one `comm="auto"` takes."""

from __future__ import annotations

import logging
from typing import Literal, get_args

import torch

from ....call.context.order import Order
from ....call.context.steps import is_aligned
from ....errors import SpecError
from ..routing import log
from .calls import Asked
from .plans import steps_around

Comm = Literal["p2p", "all_gather", "a2a", "a2a+p2p", "auto"]
COMMS: tuple[str, ...] = get_args(Comm)
LONG, FEW_KEYS = 16384, 4  # positions of a rank, and heads of queries for one of keys, for `auto`


def chosen(asked: Asked, order: Order, ranks: int) -> Comm:
    """Choose what was fastest of the strategies that serve a call.

    Raises: SpecError with the reasons of all where none does.
    """
    refused: list[str] = []
    candidates: tuple[Comm, ...] = (fastest(asked, order, ranks), "p2p", "a2a", "all_gather")
    for comm in dict.fromkeys(candidates):
        reasons = against(comm, asked, order, ranks)
        if not reasons:
            _log_choice(comm, refused)
            return comm
        refused += reasons
    raise SpecError([*dict.fromkeys(refused)])


def _log_choice(comm: Comm, refused: list[str]) -> None:
    """Say at level INFO which strategy is taken, and what is against those that came before it."""
    if torch.compiler.is_compiling() or not log.isEnabledFor(logging.INFO):
        return
    why = "; ".join(dict.fromkeys(refused)) or "the first choice for calls of its kind"
    log.info("comm='auto' takes %s: %s", comm, why)


def fastest(asked: Asked, order: Order, ranks: int) -> Comm:
    """Choose what took least time on two H200s over NVLink, in causal calls of models' shapes
    (docs/results/context-parallel.json): one after another, but for long calls of two kinds.

    Few keys for many queries are soon gathered, but their gradients have all ranks' rows to add up.
    As many heads of keys as of queries are much to send, to and fro, beside a share of them. Of
    sequences with lengths of their own each step joins all rows' outputs for few keys, but where
    heads are exchanged, or, which is computed and not timed, keys of calls that are not long are
    gathered.
    """
    q, k, v = asked.q, asked.k, asked.v
    if len(asked.lengths) > 1:
        if not against_heads(asked, ranks):
            return "a2a"
        tokens = q.shape[0] * q.shape[1]
        return "all_gather" if tokens < LONG and order.name != "striped" else "p2p"
    if q.shape[1] < LONG:
        return "p2p"
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    heads, heads_kv = q.shape[2], k.shape[2]
    if not differentiated:
        gathered = heads >= FEW_KEYS * heads_kv and order.name != "striped"
        return "all_gather" if gathered else "p2p"
    return "a2a" if heads == heads_kv and not against_heads(asked, ranks) else "p2p"


def against(comm: Comm, asked: Asked, order: Order, ranks: int) -> list[str]:
    """Why a strategy does not serve a call, as far as that depends on the strategy."""
    if comm == "a2a":
        return against_heads(asked, ranks)
    if order.name != "striped" or ranks == 1:
        return []
    if comm == "all_gather":
        return ["order 'striped' has no runs of positions. Use comm='p2p' or 'a2a'."]
    try:
        steps_around(order, asked.planned, asked.bands, asked.by_position)
    except SpecError as error:
        return [*error.reasons]
    return []


def against_heads(asked: Asked, ranks: int) -> list[str]:
    """Why ranks cannot exchange positions for heads."""
    heads, heads_kv = asked.q.shape[2], asked.k.shape[2]
    reasons = []
    if heads % ranks or heads_kv % ranks:
        reasons.append(
            f"comm='a2a': {heads} query and {heads_kv} key/value heads do not divide by {ranks} "
            "ranks. Use comm='p2p' or 'all_gather'."
        )
    for name in ("bias", "attn_mask"):
        if asked.given.get(name) is not None:
            reasons.append(
                f"comm='a2a': {name} has the rank's own queries. Use comm='p2p' or 'all_gather'."
            )
    if asked.dropout_p > 0 and not asked.uniform and ends_at_keys(asked):
        reasons.append(
            "comm='a2a': dropout beside lengths and an alignment to the bottom right. Use "
            "comm='p2p' or 'all_gather'."
        )
    return reasons


def ends_at_keys(asked: Asked) -> bool:
    """Whether the diagonal ends where the keys do."""
    given = asked.given.get("bottom_right")
    return is_aligned(asked.given.get("mask", "none"), None if given is None else bool(given))
