"""The definition of attention in plain PyTorch: oracle of the tests, and a backend of its own.

Written for reading. One sequence after another goes through `core.attend_one`; layouts only
decide where a sequence is read and where its output is written. It runs on any device and
in any floating dtype, accumulates in float32 (float64 for float64), and autograd gives its
gradients, but for FP8. It is slow and holds whole score matrices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call.signatures import signature
from ..call.table import (
    CARRIERS,
    DIFFERENTIABLE,
    REFERENCE_ROWS,
    AttentionCall,
    make_call,
    named,
)
from ..errors import SpecError
from ..results import AttentionAux
from . import fp8
from .checks import check, check_values
from .conversions import converted, with_dtypes
from .core import accumulation_dtype, attend_one, default_alibi_slopes, without_autocast
from .dropout import draw_rng_state, dropout_keep_mask
from .fp8_backward import fp8_backward
from .fp8_backward_tensors import BackwardOperands, Fp8Gradients
from .fp8_checks import scale_values
from .masks import visible
from .operands import Operands
from .reads import check_reads
from .sequences import join_lse, join_outputs, kv_sequences, kv_spans, q_spans, sequence_view

__all__ = [
    "AttentionAux",
    "AttentionCall",
    "BackwardOperands",
    "Fp8Gradients",
    "Operands",
    "attention",
    "check",
    "check_on_host",
    "converted",
    "default_alibi_slopes",
    "dropout_keep_mask",
    "fp8_backward",
    "fp8_forward",
    "run",
    "visible",
]


def attention(
    q: Tensor, k: Tensor | None = None, v: Tensor | None = None, **arguments: Any
) -> tuple[Tensor, AttentionAux]:
    """Attention as `attngen.attention` defines it; the arguments are that function's.

    Returns the output, in Q's format with V's head dim, and always the by-products; `return_lse`
    changes nothing here.

    Raises: SpecError with every violation at once.
    """
    call = make_call("reference.attention", REFERENCE_ROWS, dict(q=q, k=k, v=v), arguments)
    return run(converted(call))


attention.__signature__ = signature(  # type: ignore[attr-defined]
    REFERENCE_ROWS, "tuple[Tensor, AttentionAux]"
)


def check_on_host(call: AttentionCall, operands: Operands) -> None:
    """Refuse scales, lengths and page tables whose values cannot be right, and callables that read
    what is not there; waits for their device.

    Raises: SpecError with every violation at once.
    """
    if reasons := [*scale_values(call.scales)]:
        raise SpecError(reasons)
    queries, keys = q_spans(call, operands), kv_spans(call, operands)
    check_values(call, operands, queries, keys)
    if call.functions:
        for b, (q_span, kv_span) in enumerate(zip(queries, keys, strict=True)):
            check_reads(call, b, (operands.h_q, q_span.length, kv_span.length))


def fp8_forward(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    accumulate: torch.dtype = torch.float64,
    **arguments: Any,
) -> tuple[Tensor, AttentionAux]:
    """`attention` of FP8 operands with all that is not stored in float64, or float32 (accumulate).

    Returns the output before it is stored, and the by-products, in that dtype.

    Raises: SpecError with every violation at once.
    """
    call = make_call("reference.fp8_forward", REFERENCE_ROWS, dict(q=q, k=k, v=v), arguments)
    return run(converted(call), accumulate=accumulate)


def run(
    call: AttentionCall, checks_reads: bool = False, accumulate: torch.dtype | None = None
) -> tuple[Tensor, AttentionAux]:
    """Attention of a call that is already a value: check, then one sequence after another.

    checks_reads: name what callables read out of range, waiting for the device. accumulate: the
    dtype of all that is not stored, and then of the output, which is not stored either.

    Raises: SpecError with every violation at once.
    """
    operands = check(call)
    call = with_dtypes(call)
    queries, keys = q_spans(call, operands), kv_spans(call, operands)
    check_values(call, operands, queries, keys)
    rng_state = call.rng_state
    if call.dropout_p > 0 and rng_state is None:
        rng_state = draw_rng_state(operands.q.device)

    results = []
    for b, (q_span, kv_span) in enumerate(zip(queries, keys, strict=True)):
        q = sequence_view(operands.q, operands.layout.q_format, b, q_span)
        k, v = kv_sequences(call, operands, b, kv_span)
        if checks_reads:
            check_reads(call, b, (operands.h_q, q_span.length, kv_span.length))
        with without_autocast(q.device.type):
            first = (q_span.start, kv_span.start)
            results.append(attend_one(call, b, q, k, v, rng_state, accumulate, first))
    accumulated = accumulation_dtype(operands.q.dtype) if accumulate is None else accumulate
    out = join_outputs(operands, queries, [result.o for result in results])
    if accumulate is None:
        out = fp8.store(out, fp8.output_dtype(call), call.scale_o)
    lse = join_lse(operands, queries, [result.lse for result in results])
    max_logit = operands.q.new_full((operands.h_q,), float("-inf"), dtype=accumulated)
    amax_o = operands.q.new_zeros(1, dtype=accumulated)
    for result in results:
        max_logit = torch.maximum(max_logit, result.max_logit)
        if call.return_amax:
            amax_o = torch.cat([amax_o, result.o.abs().flatten()]).amax(0, keepdim=True)
    if not queries:  # nothing was computed, and yet there are gradients: zeros
        given = named(call)
        learned = [given.get(name) for name in DIFFERENTIABLE if name not in CARRIERS]
        for x in (operands.q, operands.k, operands.v, *learned):
            if isinstance(x, Tensor) and x.requires_grad:
                nothing = x.flatten()[:0].sum()
                out, lse = out + nothing, lse + nothing
    amax_s = (max_logit > float("-inf")).any().float()[None]  # of a row that sees a key, e^0
    aux = AttentionAux(
        lse=lse,
        max_logit=max_logit if call.return_max_logit else None,
        rng_state=rng_state,
        amax_s=amax_s if call.return_amax else None,
        amax_o=amax_o if call.return_amax else None,
    )
    return out, aux
