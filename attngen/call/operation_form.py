"""A call as operations take it: its tensors in their places, all else by the names of `Arguments`.

tensor_type, throughout: the type of a library's tensors, by which they are told from numbers.
"""

from __future__ import annotations

from typing import Any

from ..spec import layouts
from .fragments import LEARNED_SLOT, SLOTS, numbers_of, slot_tensors
from .fragments import operands_of as fragment_operands
from .memory import CONTIGUOUS, memory_of
from .numbers import Arguments
from .positions import PLACES_SLOT, Positions
from .table import INPUTS, AttentionCall
from .tensors import dtype_name, is_fp8, name_of


def operands_of(call: AttentionCall, tensor_type: type) -> tuple[Any, ...]:
    """The operations' tensors of a call, in the order of `table.INPUTS`; ALiBi's own slopes and the
    schedule, which are made later, are none."""
    of_k, of_v, *_ = (*call.page_tables, None, None)
    named = {"page_table_k": of_k, "page_table_v": of_v, "schedule": None}
    named |= dict.fromkeys((*SLOTS, LEARNED_SLOT))
    if call.fragment_arguments:
        added, own = dict(call.fragment_arguments), fragment_operands(call.mask, call.score_mod)
        named |= slot_tensors(own, added, tensor_type)
    if call.places is not None:
        named[PLACES_SLOT] = call.places
    found = [named[name] if name in named else getattr(call, name) for name in INPUTS]
    return tuple([x if isinstance(x, tensor_type) else None for x in found])


def arguments_of(call: AttentionCall, deterministic: bool, tensor_type: type) -> Arguments:
    """Arguments of the operations for a checked call. deterministic: where it says neither."""
    scale, (left, right) = call.softmax_scale, call.window
    aligned = call.mask.endswith("_bottom_right")
    own = fragment_operands(call.mask, call.score_mod)
    return Arguments(
        layout=call.layout,
        mask=call.mask,
        softmax_scale=None if scale is None else float(scale),
        window_left=-1 if left is None else left,
        window_right=-1 if right is None else right,
        bottom_right=aligned if call.bottom_right is None else call.bottom_right,
        out_dtype=_output_dtype(call),
        amax=call.return_amax,
        deterministic=deterministic if call.deterministic is None else call.deterministic,
        softcap=float(call.softcap),
        softmax=call.softmax,
        max_logit=call.return_max_logit,
        dropout_p=float(call.dropout_p),
        num_splits=call.num_splits or 0,
        bias_type="post_scale" if call.bias is None else call.bias_type,
        score_mod=call.score_mod if isinstance(call.score_mod, str) else "",
        numbers=numbers_of(own, dict(call.fragment_arguments), tensor_type) if own else "",
        positions=_positions_of(call),
        memory="" if call.out_layout == CONTIGUOUS else memory_of(call),
    )


def _positions_of(call: AttentionCall) -> str:
    if call.positions is None and call.places is None:
        return ""
    return Positions.of((0, 0) if call.positions is None else call.positions).words


def _output_dtype(call: AttentionCall) -> str:
    if call.out_dtype is not None:
        return name_of(call.out_dtype)
    return "bfloat16" if is_fp8(call.q) else dtype_name(call.q)


def default_slopes_of(call: AttentionCall, tensor_type: type) -> int:
    """Query heads of a checked call that take ALiBi's own slopes; 0 where none do."""
    if not call.has_alibi or isinstance(call.alibi_slopes, tensor_type):
        return 0
    layout = layouts.parse(call.layout)
    q, _, _ = layouts.unpack(layout, call.q, call.k, call.v)
    return layouts.size(q.shape, layout.q_format, "h")
