"""The operation `attngen::forward_onto`: 16-bit attention that joins an output and an LSE which are
there, over keys that have come before."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...call.cache import CallCache
from ...call.numbers import Arguments
from ...call.ongoing import Ongoing
from ...call.prepare.forward import prepare_forward
from ...call.prepared import PreparedCall
from ...call.table import INPUTS
from ...errors import SpecError
from ...spec import layouts
from .descriptions import all_described, device_of
from .forward import with_readable_bias
from .operation import format_of, run
from .registry import operator
from .signature import Operands, schema, split
from .torch_private import guard

library = operator(
    "forward_onto",
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) o, Tensor(b!) lse, Tensor(c!)? rounded, "
    f"Tensor? marks, bool goes_on, bool keeps, {schema()}) -> ()",
)
prepared_calls: CallCache[PreparedCall] = CallCache(guard)


def forward_onto(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    rounded: Tensor | None,
    marks: Tensor | None,
    *rest: Any,
) -> None:
    """Attend to these keys, and write what their output and LSE are together with those there.

    q, k, v as `attngen::forward` takes them, three tensors of 16 bits, dense without lengths, or
    packed. o: float32, of the output's shape, its last axis contiguous; lse: float32 [b, h_q, s_q],
    natural log, which may be a part of the rows of a larger tensor, of packed tokens [h_q, t].
    rounded: gets the output in q's dtype, with the strides of o. marks: int32 [b], of packed
    sequences what is written of each: 1, o; 2, rounded; 3, both; None for what `keeps` says. rest:
    goes_on, whether o and lse hold the output and LSE over other keys, −∞ of rows that have seen
    none, whose o may be anything, else they are written anew; keeps, whether o is written, which it
    need not be beside rounded; then the arguments of `attngen::forward` behind v, without sinks,
    with `out_dtype` float32. Rows of no sequence stay as they are. There are no gradients.

    Raises: SpecError with every violation; CompileError, LaunchError.
    """
    goes_on, keeps, *others = rest
    optional, arguments = split(others)
    operands = with_readable_bias((q, k, v, *optional))
    prepared = _find((*operands, o, lse, rounded, marks), arguments, goes_on, keeps)
    if prepared.launches:
        run(prepared, (*operands, o, lse, rounded, marks))
        return
    if marks is not None and q.numel():
        raise SpecError("marks beside no keys: there is nothing to join, leave the call out")
    if not goes_on:
        o.zero_()
        lse.fill_(-math.inf)
    if rounded is not None:
        axes = "ht" if lse.ndim == 2 else "bhs"
        order = [axes.index(x) for x in layouts.parse(arguments.layout).q_format if x in axes]
        unseen = (lse == -math.inf).permute(order).unsqueeze(-1)
        rounded.copy_(o.masked_fill(unseen, 0.0))


def _find(
    operands: Operands, arguments: Arguments, goes_on: bool, keeps: bool, gather: bool = False
) -> PreparedCall:
    """Find what a call needs, worked out once. operands: of `INPUTS`, and what they join; gather:
    threads copy them, since some begin at no multiple of 16 bytes. Raises: as the operation."""
    key = (arguments, goes_on, keeps, gather, *map(format_of, operands))
    return prepared_calls.remember(
        key, lambda: _prepare(operands, arguments, goes_on, keeps, gather)
    )


def _prepare(
    operands: Operands, arguments: Arguments, goes_on: bool, keeps: bool, gather: bool
) -> PreparedCall:
    """Everything about a call but addresses. Raises: as the operation."""
    described = all_described(operands)
    o, lse, rounded, marks = described[len(INPUTS) :]
    q, *_ = operands
    assert q is not None and o is not None and lse is not None  # the operation's schema
    gathering = partial(_find, arguments=arguments, goes_on=goes_on, keeps=keeps, gather=True)
    joins = Ongoing(o, lse, rounded, marks, goes_on, keeps)
    return prepare_forward(
        described[: len(INPUTS)], arguments, device_of(q.device), gathering, gather, joins=joins
    )


def _fake_forward_onto(*_: Any) -> None:
    """Nothing is returned."""


library.impl("forward_onto", forward_onto, "CUDA")
torch.library.register_fake("attngen::forward_onto", _fake_forward_onto, lib=library)
