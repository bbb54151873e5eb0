"""The operation `attngen::forward`: attention in 16 or 8 bits, by compiled kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...call.cache import CallCache
from ...call.numbers import Arguments
from ...call.operands import unpacked
from ...call.prepare.forward import maxima_of, prepare_forward
from ...call.prepared import PreparedCall
from ...call.table import INPUTS
from ...call.tensors import TensorDesc
from ...reference.fp8 import is_fp8
from . import autograd, bias
from .descriptions import all_described, device_of
from .operation import format_of, run, unread_memory
from .outputs import new_outputs
from .registry import operator
from .signature import Operands, dtype_of, schema, split
from .torch_private import guard
from .transforms import differentiable

library = operator(
    "forward",
    f"(Tensor q, Tensor? k, Tensor? v, {schema()}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
prepared_calls: CallCache[PreparedCall] = CallCache(guard)
_Q, _BIAS, _SCALE_S = map(INPUTS.index, ("q", "bias", "scale_s"))


def forward(q: Tensor, k: Tensor | None, v: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """Attention: output, log-sum-exp, the maxima of S and O, the largest scores.

    q, k, v: as the layout has them, float16 or bfloat16, or float8_e4m3fn or float8_e5m2 (k and v
    alike, head dims multiples of 16); one CUDA device, any strides; of FP8 and of pages the last
    axis contiguous, other strides and addresses multiples of 16 bytes. rest: the tensors of
    `signature.OPTIONAL`, then `signature.Arguments`. Scales (FP8): float32 [1], or None for 1
    (scale_s with descale_s: for the kernel's choice); descales of q, k and v may be [b, h_kv], too.
    Lengths: int32, contiguous, said for each side that has them; of dense operands as seqused, None
    where all positions are.
    alibi_slopes: float32 [h_q] or [b, h_q]; sink: float32 [h_q].
    Returns the output in Q's axis order and `out_dtype`, the LSE, natural log, float32
    [b, h_q, s_q] (of packed tokens [h_q, t]), two float32 [1], [0] without `amax`, and the largest
    score of each head, float32 [h_q], [0] without `max_logit`.
    Raises: SpecError with every violation; CompileError, LaunchError.
    """
    optional, arguments = split(rest)
    operands = with_readable_bias((q, k, v, *optional))
    prepared = find_prepared(operands, arguments)
    found = dict(zip(prepared.names, run(prepared, operands), strict=True))
    absent = _new_maxima(q, Arguments())
    return found["o"], found["lse"], *(found.get(name, x) for name, x in absent.items())


def with_readable_bias(operands: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The operands with their bias as kernels are quick to read it."""
    added = operands[_BIAS]
    if added is None or (quick := bias.readable(added)) is added:
        return operands
    return (*operands[:_BIAS], quick, *operands[_BIAS + 1 :])


def find_prepared(
    operands: Operands,
    arguments: Arguments,
    gather: bool = False,
    alone: bool = False,
    into: TensorDesc | None = None,
) -> PreparedCall:
    """The launch of a call, worked out once.

    gather: threads copy the operands, since some begin at no multiple of 16 bytes. alone: where
    there is a kernel that writes the output alone, it is that one. into: where the output is
    written, which then follows the operands in a launch. Raises: SpecError, CompileError,
    LaunchError.
    """
    key = (arguments, gather, alone, into, *map(format_of, operands))
    return prepared_calls.remember(key, lambda: _prepare(operands, arguments, gather, alone, into))


def find_alone(
    operands: Operands, arguments: Arguments, into: TensorDesc | None = None
) -> PreparedCall:
    """The launch of a call that wants the output alone.

    A scale says how the largest weight of a row is stored, and may cut it, which sums of stored
    weights would not show. Raises: as `find_prepared`.
    """
    plain = is_fp8(operands[_Q].dtype) and operands[_SCALE_S] is None  # type: ignore[union-attr]
    return find_prepared(operands, arguments, False, plain, into).first_alone(unread_memory)


def _prepare(
    operands: Operands, arguments: Arguments, gather: bool, alone: bool, into: TensorDesc | None
) -> PreparedCall:
    """Everything about a forward but addresses. Raises: SpecError with every violation."""
    q, *_ = operands
    assert q is not None  # the operation's schema
    if arguments.out_dtype is not None:
        dtype_of(arguments.out_dtype)

    def gathering(given: Operands) -> PreparedCall:
        return find_prepared(given[: len(INPUTS)], arguments, gather=True, into=into)

    return prepare_forward(
        *(all_described(operands), arguments, device_of(q.device), gathering, gather, alone),
        into=into,
    )


def _new_maxima(q: Tensor, arguments: Arguments) -> dict[str, Tensor]:
    """New tensors for the maxima of a call; [0] where nobody asks for them."""
    sizes = maxima_of(q, arguments)
    return {name: q.new_empty(n, dtype=torch.float32) for name, n in sizes.items()}


def _fake_forward(q: Tensor, k: Tensor | None, v: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    _, arguments = split(rest)
    q, k, v = unpacked(q, k, v, arguments.layout)
    maxima = _new_maxima(q, arguments)
    return *new_outputs(q, v, arguments), *maxima.values()


library.impl("forward", forward, "CUDA")
torch.library.register_fake("attngen::forward", _fake_forward, lib=library)
dispatched = differentiable("forward", autograd.gradients, autograd.setup_context, library=library)
