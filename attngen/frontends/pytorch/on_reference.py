"""The operations `attngen::reference` and `attngen::reference_backward`: the definition of
attention as torch's tracers see it.

A trace follows no loop over sequences, whose number is a symbol, and reads no lengths. Where one is
on, where tensors have no values, and where they are distributed, a call is one operation, whose
shapes follow from those of its operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from ... import reference
from ...call.fragments import LEARNED_SLOT, SLOTS, given_by
from ...call.fragments import operands_of as fragment_operands
from ...call.memory import memory_of, order_in
from ...call.numbers import Arguments
from ...call.operands import heads_of, unpacked
from ...call.positions import PLACES_SLOT, Positions
from ...call.table import (
    DIFFERENTIABLE,
    INPUTS,
    OPTIONAL,
    AttentionCall,
    names,
)
from ...errors import SpecError
from ...reference.core import accumulation_dtype, default_alibi_slopes
from ...reference.dropout import draw_rng_state
from ...results import AttentionAux
from . import sharding
from .checked_call import arguments_of, operands_of
from .outputs import laid_out, new_outputs
from .registry import operator
from .signature import dtype_of, schema, split
from .torch_private import has_transforms, is_traced
from .transforms import differentiable

_NUMBERS = names("number")
_GIVEN = (
    f"Tensor q, Tensor? k, Tensor? v, {schema()}, "
    "SymInt? max_seqlen_q=None, SymInt? max_seqlen_kv=None"
)
_WANTED = ", ".join(f"bool want_{name}=True" for name in DIFFERENTIABLE)
_GRADIENTS = ", ".join(["Tensor"] * len(DIFFERENTIABLE))

_forwards = operator("reference", f"({_GIVEN}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
_backwards = operator(
    "reference_backward", f"(Tensor? d_o, Tensor? dlse, {_GIVEN}, {_WANTED}) -> ({_GRADIENTS})"
)


def run(call: AttentionCall, checks_reads: bool = False) -> tuple[Tensor, AttentionAux]:
    """Attention by the reference: as one operation for those who need one, else as the definition
    says, which may be differentiated as often as one likes. checks_reads: as `reference.run` has
    it.

    Raises: SpecError with every violation at once.
    """
    operands = operands_of(call)
    distributed = sharding.is_distributed(operands)
    if distributed:
        sharding.refuse_functions(call.functions)
    elif not is_traced(operands) or _must_be_followed(call):
        out, aux = reference.run(call, checks_reads)
        order, *_ = memory_of(call).split(",")
        return laid_out(out, order), aux
    reference.check(call)
    arguments = arguments_of(call)._replace(num_splits=0)
    rng_state = call.rng_state
    if call.dropout_p > 0 and rng_state is None:
        rng_state = draw_rng_state(call.q.device)
    slopes = call.alibi_slopes if isinstance(call.alibi_slopes, Tensor) else None
    if call.has_alibi and slopes is None:
        q, _, _ = unpacked(call.q, call.k, call.v, call.layout)
        slopes = default_alibi_slopes(heads_of(q, arguments), q.device)
    made = {"alibi_slopes": slopes, "rng_state": rng_state}
    named = dict(zip(INPUTS, operands, strict=True)) | made
    rest = (*arguments, call.max_seqlen_q, call.max_seqlen_kv)
    attend = sharding.over_shards(dispatched) if distributed else dispatched
    out, lse, amax_s, amax_o, max_logit = attend(*named.values(), *rest)
    return out, AttentionAux(
        lse=lse,
        max_logit=max_logit if call.return_max_logit else None,
        rng_state=rng_state,
        amax_s=amax_s if call.return_amax else None,
        amax_o=amax_o if call.return_amax else None,
    )


def _must_be_followed(call: AttentionCall) -> bool:
    """Whether an operation cannot stand for a call: one that is transformed, and may be
    differentiated twice, or that has functions, or numbers in tensors, which may have gradients."""
    numbers = [isinstance(getattr(call, name), Tensor) for name in _NUMBERS]
    return has_transforms() or bool(call.functions) or any(numbers)


def call_of(operands: Sequence[Tensor | None], rest: Sequence[Any]) -> AttentionCall:
    """The call that an operation stands for. rest: what it got after q, k and v."""
    given = dict(zip(INPUTS, operands, strict=True))
    table_k, table_v = given.pop("page_table_k"), given.pop("page_table_v")
    del given["schedule"]
    _, arguments = split(rest)
    slots = {name: given.pop(name) for name in (*SLOTS, LEARNED_SLOT)}
    places = slots.pop(PLACES_SLOT) if arguments.positions else None
    own = fragment_operands(arguments.mask, arguments.score_mod)
    most_q, most_kv, *_ = (*rest[len(OPTIONAL) + len(Arguments._fields) :], None, None)
    return AttentionCall(
        **given,  # type: ignore[arg-type]  # q is there: the operation's schema
        page_table=None if table_k is None else (table_k, table_v),  # type: ignore[arg-type]
        layout=arguments.layout,
        mask=arguments.mask,
        window=(arguments.window_left, arguments.window_right),
        bottom_right=arguments.bottom_right,
        positions=Positions.read(arguments.positions) if arguments.positions else None,
        places=places,
        softmax_scale=arguments.softmax_scale,
        softcap=arguments.softcap,
        softmax=arguments.softmax,
        bias_type=arguments.bias_type,
        dropout_p=arguments.dropout_p,
        out_dtype=None if arguments.out_dtype is None else dtype_of(arguments.out_dtype),
        return_max_logit=arguments.max_logit,
        return_amax=arguments.amax,
        score_mod=arguments.score_mod or None,
        fragment_arguments=given_by(own, slots, arguments.numbers),
        max_seqlen_q=most_q,
        max_seqlen_kv=most_kv,
    )


def forward(q: Tensor, k: Tensor | None, v: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """Attention as `attngen::forward` has it, its operands in any dtype on any device; slopes may
    have a gradient, too. Raises: SpecError."""
    optional, _ = split(rest)
    return _attend((q, k, v, *optional), rest)


def _attend(operands: Sequence[Tensor | None], rest: Sequence[Any]) -> tuple[Tensor, ...]:
    call = call_of(operands, rest)
    out, aux = reference.run(call)
    _, arguments = split(rest)
    out = laid_out(out, order_in(arguments))
    assert aux.lse is not None
    maxima = (aux.amax_s, aux.amax_o, aux.max_logit)
    nothing = out.new_empty(0, dtype=torch.float32)
    return out, aux.lse, *(nothing.clone() if x is None else x.float() for x in maxima)


def backward(
    d_o: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor | None, v: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of `DIFFERENTIABLE`, contiguous; [0] of what is not wanted, or not there.

    d_o, dlse: those of the output and the LSE, None where nothing depends on it. Raises: SpecError.
    """
    optional, _ = split(rest)
    operands = [q, k, v, *optional]
    wanted = _wanted_of(operands, rest)
    leaves = [x for x, want in zip(operands, wanted, strict=True) if want and x is not None]

    def outputs(*leaves: Tensor) -> tuple[Tensor, ...]:
        given = iter(leaves)
        pairs = zip(operands, wanted, strict=True)
        out, lse, *_ = _attend([next(given) if want else x for x, want in pairs], rest)
        both = ((out, d_o), (lse, dlse))
        return tuple(x for x, gradient in both if gradient is not None)

    found: list[Tensor] = []
    if leaves:
        _, pull, *_ = torch.func.vjp(outputs, *leaves)
        found += pull(tuple(x for x in (d_o, dlse) if x is not None))
    gradients = iter(found)
    places = [INPUTS.index(name) for name in DIFFERENTIABLE]
    return tuple(
        # Of its own memory, as an operation returns nothing that lies elsewhere.
        next(gradients).clone(memory_format=torch.contiguous_format)
        if wanted[place]
        else q.new_empty(0)
        for place in sorted(places)
    )


def _wanted_of(operands: Sequence[Tensor | None], rest: Sequence[Any]) -> list[bool]:
    """Which operands of a backward a gradient is wanted of."""
    flags = rest[len(OPTIONAL) + len(Arguments._fields) + 2 :]
    flags = (*flags, *[True] * (len(DIFFERENTIABLE) - len(flags)))
    asked = {*compress(DIFFERENTIABLE, flags)}
    return [
        name in asked and x is not None and (name not in SLOTS or x.is_floating_point())
        for name, x in zip(INPUTS, operands, strict=True)
    ]


# ---- for tracers, and for autograd


def _fake_forward(q: Tensor, k: Tensor | None, v: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    _, arguments = split(rest)
    q, _, v = unpacked(q, k, v, arguments.layout)
    out, lse = new_outputs(q, v, arguments)
    sizes = (
        int(arguments.amax),
        int(arguments.amax),
        heads_of(q, arguments) if arguments.max_logit else 0,
    )
    maxima = (q.new_empty(size, dtype=torch.float32) for size in sizes)
    return out, lse.to(accumulation_dtype(q.dtype)), *maxima


def _fake_backward(
    d_o: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor | None, v: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    optional, _ = split(rest)
    operands = [q, k, v, *optional]
    pairs = zip(INPUTS, operands, _wanted_of(operands, rest), strict=True)
    return tuple(
        q.new_empty(0) if x is None or not want else x.new_empty(x.shape)
        for name, x, want in pairs
        if name in DIFFERENTIABLE
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors = len(INPUTS)
    ctx.save_for_backward(*inputs[:tensors], *[None] * (tensors - len(inputs)))
    ctx.rest = tuple(inputs[tensors:])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])


def _gradients(
    ctx: Any, d_o: Tensor | None, dlse: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad  # the dispatcher left out what equals its default at the end
    returned: list[Tensor | None] = [None] * len(needed)
    if d_o is None and dlse is None:
        return tuple(returned)
    places = sorted(INPUTS.index(name) for name in DIFFERENTIABLE)
    wanted = [place < len(needed) and needed[place] for place in places]
    count = len(Arguments._fields)
    arguments = Arguments(*ctx.rest[:count])
    most = (*ctx.rest[count:], None, None)[:2]
    found = _dispatched_backward(d_o, dlse, *ctx.saved_tensors, *arguments, *most, *wanted)
    for place, want, gradient in zip(places, wanted, found, strict=True):
        if want:
            returned[place] = gradient
    return tuple(returned)


def _second_derivative(*_: Any) -> None:
    raise SpecError(
        "traced calls have no second derivative: differentiate before tracing, or call "
        "backend='reference' outside of the trace"
    )


for _library, _name, _run, _fake in (
    (_forwards, "reference", forward, _fake_forward),
    (_backwards, "reference_backward", backward, _fake_backward),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"attngen::{_name}", _fake, lib=_library)
dispatched = differentiable("reference", _gradients, _setup_context, library=_forwards)
_dispatched_backward = differentiable("reference_backward", _second_derivative, library=_backwards)
