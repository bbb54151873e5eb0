"""Calls whose mask_mod becomes bits and a map of blocks: which kernels serve, and what is known of
such calls when they come again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...call.routing import spec_of_call
from ...call.served import unserved
from ...call.table import ROWS, AttentionCall, given_by
from ...fragments import features
from ...spec.problem import LISTED
from ...spec.resolve import find_violations
from . import descriptions
from .callable_bits import Listed, made_by
from .callable_mask import Masks, Sizes
from .callable_program import Traced
from .operation import format_of

_MOST_KNOWN = 4096
_ABSENT = object()
Facts = tuple[Any, ...]


@dataclass(frozen=True)
class Known:
    """A served call, for those of equal facts: its sizes, and whether gradients need
    the mask, too, where these are on."""

    sizes: Sizes
    learns: bool


_known: dict[Facts, Known] = {}


def lists_serve(call: AttentionCall) -> bool:
    """Whether kernels that visit the blocks of a mask serve a call with a mask_mod, or with a
    block_mask alone."""
    arch = descriptions.device_arch(call.q.device)
    both = call.mask_mod is not None and call.block_mask is not None
    if arch is None or call.attn_mask is not None or both:
        return False
    spec = spec_of_call(replace(call, mask_mod=None, block_mask=None, score_mod=None))
    spec = replace(spec, mask_mod=LISTED, decode=False)
    return not (find_violations(spec, features.scan()) or unserved(spec, arch))


def made_for(call: AttentionCall, masks: Masks, traced: Traced, sizes: Sizes) -> Tensor:
    """The mask of a call that lists serve, which calls of equal facts know from now on."""
    carriers = [x for x in (call.q, call.k, call.v) if x is not None]
    # What a score_mod captures may require gradients, too.
    learns = call.score_mod is not None or any([x.requires_grad for x in carriers])
    facts, known = facts_of(given_by(call)), Known(sizes, learns)
    if facts is not None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[facts] = known
    return made_again(known, masks, traced, call.q.device)


def made_of_blocks(call: AttentionCall, masks: Masks, traced: Traced, sizes: Sizes) -> Tensor:
    """The mask of a call that lists serve, whose block_mask has this program: made anew as its
    lists change."""
    block_mask: Any = call.block_mask
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    lists = [getattr(block_mask, name) for name in names]
    read = replace(traced, sources=(*traced.sources, *[x for x in lists if x is not None]))

    def make(traced: Traced, sizes: Sizes, device: torch.device) -> Tensor:
        listed = Listed.of(block_mask, sizes)
        return made_by(traced, sizes, device, columns=_learns(call), listed=listed)

    kind = f"blocks of {block_mask.BLOCK_SIZE}, {_learns(call)}"
    return masks.of(make, read, sizes, call.q.device, (kind,))


def _learns(call: AttentionCall) -> bool:
    """Whether a call may have gradients: what a score_mod captures may require some, too."""
    carriers = [x for x in (call.q, call.k, call.v) if x is not None]
    learns = call.score_mod is not None or any([x.requires_grad for x in carriers])
    return learns and torch.is_grad_enabled()


def known_of(arguments: Mapping[str, Any]) -> Known | None:
    """Find what is known of a call of these arguments, q, k and v among them; None if nothing."""
    facts = facts_of(arguments)
    return None if facts is None else _known.get(facts)


def made_again(known: Known, masks: Masks, traced: Traced, device: torch.device) -> Tensor:
    """The mask of such a call. Without gradients one that has what they need serves as well."""
    columns = known.learns and torch.is_grad_enabled()
    kinds = ("columns",) if columns else ("columns", "rows")
    make = partial(made_by, columns=columns)
    return masks.of(make, traced, known.sizes, device, kinds)


def facts_of(arguments: Mapping[str, Any]) -> Facts | None:
    """Facts that decide how a call is served: formats of tensors, values of others, which of them
    are functions; None where they cannot be kept."""
    facts: list[Facts] = []
    for name in sorted(arguments):
        x, row = arguments[name], ROWS.get(name)
        if x is None or x is (_ABSENT if row is None else row.default):
            continue
        if isinstance(x, Tensor):
            facts.append((name, format_of(x), x.requires_grad))
        else:
            facts.append((name, callable(x) or x))
    try:
        hash(found := tuple(facts))
    except TypeError:
        return None
    return found
