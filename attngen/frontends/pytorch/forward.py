"""The operation `attngen::forward`: attention in 16 or 8 bits, by compiled kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...call import fragment_values
from ...call.bias import extent_of
from ...call.cache import CallCache
from ...call.numbers import Arguments
from ...call.operands import (
    extents_of,
    heads_of,
    layout_of,
    scalars_of,
    sequences_of,
    sources_of,
    spec_of,
    unpacked,
)
from ...call.table import INPUTS, OPTIONAL
from ...errors import SpecError
from ...reference.fp8 import is_fp8
from ...runtime.launch import prepare
from ...runtime.run_time import Extent, Scalars
from . import autograd, bias, decode, schedule
from .checks import violations
from .kernel_choice import choose, launched
from .operation import Output, PreparedCall, format_of, kernels_of, lay_out_workspaces, run
from .outputs import new_outputs
from .registry import operator
from .signature import Operands, schema, split
from .torch_private import guard
from .transforms import differentiable

library = operator(
    "forward",
    f"(Tensor q, Tensor? k, Tensor? v, {schema()}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
UNUSED = ("o_parts", "lse_parts")  # workspaces that keys in one split do without
prepared_calls: CallCache[PreparedCall] = CallCache(guard)
_BIAS, _SCALE_S = map(INPUTS.index, ("bias", "scale_s"))


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
    absent = _new_maxima(q, 0, Arguments())
    return found["o"], found["lse"], *(found.get(name, x) for name, x in absent.items())


def with_readable_bias(operands: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The operands with their bias as kernels are quick to read it."""
    added = operands[_BIAS]
    if added is None or (quick := bias.readable(added)) is added:
        return operands
    return (*operands[:_BIAS], quick, *operands[_BIAS + 1 :])


def find_prepared(
    operands: Operands, arguments: Arguments, gather: bool = False, alone: bool = False
) -> PreparedCall:
    """What a call needs, worked out once. gather: threads copy the operands, since some begin at no
    multiple of 16 bytes. alone: where there is a kernel that writes the output alone, it is that
    one. Raises: SpecError, CompileError, LaunchError."""
    key = (arguments, gather, alone, *map(format_of, operands))
    return prepared_calls.remember(key, lambda: _prepare(operands, arguments, gather, alone))


def find_alone(operands: Operands, arguments: Arguments) -> PreparedCall:
    """The same for a call that wants the output alone. A scale says how the largest weight of a row
    is stored, and may cut it, which sums of stored weights would not show. Raises: as that."""
    plain = is_fp8(operands[0].dtype) and operands[_SCALE_S] is None  # type: ignore[union-attr]
    return find_prepared(operands, arguments, alone=plain).first_alone()


def _refuse_addresses(_: Operands) -> PreparedCall:
    raise SpecError(
        "FP8 operands and pages must start at a multiple of 16 bytes; clone what does not"
    )


@dataclass(frozen=True, eq=False)
class Forward:
    """A forward as its kernels are chosen.

    q, k, v: views; optional: the tensors beside them, by their names; extents, scalars: what
    kernels know of them. gather: whether threads copy operands; alone: whether the kernel for the
    output alone serves it. table: the order of sequences that a schedule keeps.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    optional: dict[str, Tensor | None]
    arguments: Arguments
    gather: bool
    alone: bool
    extents: dict[str, Extent]
    scalars: Scalars
    table: Tensor | None


def _prepare(operands: Operands, arguments: Arguments, gather: bool, alone: bool) -> PreparedCall:
    """Everything about a forward but addresses. Raises: SpecError with every violation."""
    q, k, v, *rest = operands
    assert q is not None  # the operation's schema
    carriers, optional = {"q": q, "k": k, "v": v}, dict(zip(OPTIONAL, rest, strict=True))
    q, k, v = unpacked(q, k, v, arguments.layout)
    sequences = sequences_of(q, optional, arguments.layout)
    table = schedule.table_for(optional["schedule"], sequences, served=not gather)
    out, lse = new_outputs(q, v, arguments)
    tensors = {"q": q, "k": k, "v": v, "o": out}
    extents = extents_of(tensors, arguments.layout)
    if reasons := violations(tensors, extents, optional, arguments, gather):
        raise SpecError(reasons)
    no_key: dict[str, float | str] = {"off_by_one": 0.0, "learnable": "sink"}
    empty_lse, lowest = no_key.get(arguments.softmax, -math.inf), {"max_logit": -math.inf}
    maxima = _new_maxima(q, heads_of(q, arguments), arguments)
    prepared = PreparedCall(
        operands=tuple(
            (place, name)
            for place, (name, x) in enumerate(zip(INPUTS, operands, strict=True))
            if x is not None
        ),
        sources=(
            *sources_of(carriers, optional, arguments),
            *schedule.sources_of(table, "fwd"),
        ),
        outputs=(
            Output.like("o", out, 0.0),
            Output.like("lse", lse, empty_lse),
            *(
                Output.like(name, x, lowest.get(name, 0.0), preset=True)
                for name, x in maxima.items()
                if x.numel()
            ),
        ),
        fixed={},
        device=q.device,
    )
    scalars = scalars_of(q, optional, arguments, extents)
    if not (q.numel() and k.numel() and out.numel() and scalars.sequences):
        return prepared
    call = Forward(q, k, v, optional, arguments, gather, alone, extents, scalars, table)
    present = {name for _, name in prepared.operands} | {*prepared.names}
    absent = [name for name in (*INPUTS, *maxima) if name not in present]
    absent += fragment_values.absent_from(optional, arguments)
    return _with_launches(prepared, call, absent)


def _with_launches(prepared: PreparedCall, call: Forward, absent: Sequence[str]) -> PreparedCall:
    """The forward with launches of the kernels that this call takes. absent: operands and results
    that it has not. Raises: CompileError, LaunchError."""
    q, optional, arguments, extents = call.q, call.optional, call.arguments, call.extents
    sequences = call.scalars.sequences
    if (added := optional["bias"]) is not None:
        extents["bias"] = extent_of(added, sequences or 0, extents["q"].heads)
    spec = spec_of(q, call.k, call.v, optional, arguments, call.gather)
    unaligned: Callable[[Operands], PreparedCall] | None = _refuse_addresses
    if spec.gathers:
        unaligned = None
    elif not is_fp8(q.dtype) and not layout_of(arguments.layout).paged:
        unaligned = partial(find_prepared, arguments=arguments, gather=True)
    asked, splits = arguments.num_splits, 1
    wants: tuple[str, ...] = ("o",) if call.alone else ("o", "lse")
    choice = choose(spec, q.device, extents, call.scalars, wants, splits=asked)
    kernels = kernels_of(spec, q.device, choice)
    if spec.decode:
        reader, *_ = kernels
        splits = decode.splits_of(reader, extents, optional, call.scalars, asked)
        wants = decode.results_of(splits)
    kernels, unwritten = launched(kernels, wants, sequences)
    numbers = {
        **call.scalars.numbers,
        **decode.numbers_of(extents, optional),
        "splits": splits,
        **schedule.numbers_of(call.table),
    }
    scalars = replace(call.scalars, numbers=numbers)
    launches = tuple(prepare(each, extents, scalars) for each in kernels)
    elsewhere = schedule.PARTS["fwd"] if call.table is not None else unwritten
    offsets, size = lay_out_workspaces(kernels, extents["q"], scalars, splits, elsewhere)
    named = {name for each in launches for _, name in each.pointers}
    return replace(
        prepared,
        fixed={name: 0 for name in (*UNUSED, *absent, *unwritten) if name in named},
        launches=launches,
        offsets=offsets,
        workspace_bytes=size,
        counts_tiles=any("tile_counter" in each.kernel.workspace for each in kernels),
        unaligned=unaligned,
    )


def _new_maxima(q: Tensor, heads: int, arguments: Arguments) -> dict[str, Tensor]:
    """New tensors for the maxima of a call; [0] where nobody asks for them."""
    sizes = dict.fromkeys(("amax_s", "amax_o"), int(arguments.amax))
    sizes["max_logit"] = heads if arguments.max_logit else 0  # a symbol in a trace
    return {name: q.new_empty(n, dtype=torch.float32) for name, n in sizes.items()}


def _fake_forward(q: Tensor, k: Tensor | None, v: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    _, arguments = split(rest)
    q, k, v = unpacked(q, k, v, arguments.layout)
    maxima = _new_maxima(q, heads_of(q, arguments), arguments)
    return *new_outputs(q, v, arguments), *maxima.values()


library.impl("forward", forward, "CUDA")
torch.library.register_fake("attngen::forward", _fake_forward, lib=library)
dispatched = differentiable("forward", autograd.gradients, autograd.setup_context, library=library)
