"""Calls whose mask_mod becomes bits and a map of blocks: which kernels serve, and what is known of
such calls when they come again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ....call.made_mask import is_asked
from ....call.room import bytes_named
from ....call.routing import spec_of_call
from ....call.served import unserved
from ....call.table import ROWS, AttentionCall, given_by, named
from ....fragments import features
from ....fragments.program import Program
from ....spec import layouts
from ....spec.attention_spec import AttentionSpec
from ....spec.masks import joined
from ....spec.problem import LISTED
from ....spec.resolve import find_violations
from .. import descriptions
from ..operation import format_of
from .asked import AskedMaker
from .bits import VARIABLE, Listed, Maker, maker_of
from .compiled import is_traced_call
from .mask import MOST_BYTES, Masks, Sizes
from .operator import traced_mask
from .program import Traced

_MOST_KNOWN = 4096
_MOST_MAKERS = 64
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv", "seqstart_q", "seqstart_kv")
_DEFAULTS = {name: row.default for name, row in ROWS.items()}
Facts = frozenset[tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class Known:
    """A served call, for those of equal facts: its sizes, and whether gradients need the mask, too,
    where these are on; orders: whether its lengths vary; may_ask: whether its kernels may ask a
    mask's program; makers: of its masks, by functions and
    formats of what these capture."""

    sizes: Sizes
    learns: bool
    orders: bool
    may_ask: bool
    makers: dict[Any, Maker | AskedMaker] = field(default_factory=dict)


_known: dict[Facts, Known] = {}


def lists_serve(call: AttentionCall) -> bool:
    """Whether kernels that read masks made before serve a call with a mask_mod or a block_mask;
    beside an attn_mask, which may end anywhere where lengths vary, those of other lengths."""
    arch, layout = descriptions.device_arch(call.q.device), layouts.parse(call.layout)
    if arch is None or (call.attn_mask is not None and layout.masks_end_anywhere):
        return False
    spec = _spec_of(call)
    return not (find_violations(spec, features.scan()) or unserved(spec, arch))


def _spec_of(call: AttentionCall) -> AttentionSpec:
    """The spec of a call whose mask was made before, but for its scores of functions."""
    beside = replace(call, attn_mask=None, mask_mod=None, block_mask=None, score_mod=None)
    return replace(spec_of_call(beside), mask_mod=LISTED, decode=False)


def _may_ask(call: AttentionCall, mask_mod: Program) -> bool:
    """Whether kernels of a call that lists serve may ask the program of its mask."""
    features.register_program(mask_mod)
    spec = replace(_spec_of(call), mask=joined([call.mask, mask_mod.name]))
    return not find_violations(spec, features.scan())


def stands_for(mask: Tensor, mask_mod: Program, given: str) -> dict[str, Any]:
    """The arguments of a call with a mask made of a mask_mod. given: its mask by name."""
    if not is_asked(mask):
        return {"attn_mask": mask}
    return {"attn_mask": mask, "mask": joined([given, mask_mod.name])}


def made_for(call: AttentionCall, masks: Masks, traced: Traced, sizes: Sizes) -> Tensor:
    """The mask of a call that lists serve, which calls of equal facts know from now on."""
    if is_traced_call(call):
        return traced_mask(traced, sizes, call.q, _learns_now(call), shown=call.attn_mask)
    facts, given = facts_of(given_by(call)), named(call)
    orders = any([given[each] is not None for each in _LENGTHS])
    known = Known(sizes, _may_learn(call), orders, _may_ask(call, traced.program))
    if facts is not None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[facts] = known
    read = traced.captures, traced.sources
    # Makers are kept by what traced a function, and no captured tensor with them.
    bare = replace(traced, captures=(), sources=(), origins=())
    return made_again(known, masks, bare, read, call.q.device, call.attn_mask)


def made_of_blocks(
    call: AttentionCall, masks: Masks, traced: Traced, sizes: Sizes, shown: Tensor | None
) -> Tensor:
    """The mask of a call that lists serve, whose block_mask has this program: made anew as its
    lists change. shown: booleans beside it."""
    block_mask: Any = call.block_mask
    if is_traced_call(call):
        listed = Listed.of(block_mask, sizes)
        return traced_mask(traced, sizes, call.q, _learns_now(call), listed, shown)
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    lists = [getattr(block_mask, name) for name in names]
    beside = [x for x in (*lists, shown) if x is not None]
    read = replace(traced, sources=(*traced.sources, *beside))
    columns = _learns_now(call)

    def make(traced: Traced, sizes: Sizes, device: torch.device) -> Tensor:
        listed = Listed.of(block_mask, sizes)
        maker = maker_of(traced, sizes, device, columns=columns, listed=listed, shown=shown)
        return maker(traced.captures, shown)

    kind = f"blocks of {block_mask.BLOCK_SIZE}, {columns}, {shown is None}"
    return masks.of(make, read, sizes, call.q.device, (kind,))


def _may_learn(call: AttentionCall) -> bool:
    """Whether a call may have gradients: what a score_mod captures may require some, too."""
    tensors = [x for x in given_by(call).values() if isinstance(x, Tensor)]
    return call.score_mod is not None or any([x.requires_grad for x in tensors])


def _learns_now(call: AttentionCall) -> bool:
    """Whether gradients of a call are wanted, as far as is known."""
    return torch.is_grad_enabled() and _may_learn(call)


def known_of(arguments: Mapping[str, Any]) -> Known | None:
    """Find what is known of a call of these arguments, q, k and v among them; None if nothing."""
    facts = facts_of(arguments)
    return None if facts is None else _known.get(facts)


def made_again(
    known: Known,
    masks: Masks,
    traced: Traced,
    read: tuple[Sequence[Tensor], Sequence[Tensor]],
    device: torch.device,
    shown: Tensor | None,
) -> Tensor:
    """The mask of such a call. Without gradients one that has what they need serves as well.

    read: tensors that the program reads, and what these are made of; shown: booleans beside it.
    """
    captures, sources = read
    columns = known.learns and torch.is_grad_enabled()
    most = bytes_named(VARIABLE, MOST_BYTES)  # which decides whether there are bits

    def make() -> Tensor:
        own = columns, most, traced, *[(x.shape, x.stride()) for x in captures]
        maker = known.makers.get(own)
        if maker is None:
            whole = replace(traced, captures=tuple(captures))
            asks = known.may_ask
            maker = maker_of(whole, known.sizes, device, columns=columns, shown=shown, may_ask=asks)
            if len(known.makers) >= _MOST_MAKERS:
                known.makers.clear()
            known.makers[own] = maker
        return maker(captures, shown)

    if traced.key is None:
        return make()
    kinds = ("columns",) if columns else ("columns", "rows")
    key = traced.key, known.sizes, device, shown is None, most
    sources = sources if shown is None else [*sources, shown]
    mask = masks.kept(make, key, sources, device, kinds)
    # Of another call's, which asks its program, kernels that read bits can make nothing.
    return make() if is_asked(mask) and not known.may_ask else mask


def facts_of(arguments: Mapping[str, Any]) -> Facts | None:
    """Facts that decide how a call is served: formats of tensors, values of others, which of them
    are functions; None where they cannot be kept. Of a schedule, which holds masks, none is."""
    facts: list[tuple[Any, ...]] = []
    for name, x in arguments.items():
        if x is None or x is _DEFAULTS.get(name) or name == "schedule":
            continue
        if isinstance(x, Tensor):
            facts.append((name, format_of(x), x.requires_grad))
        else:
            facts.append((name, callable(x) or x))
    try:
        return frozenset(facts)
    except TypeError:  # of what has no hash
        return None
