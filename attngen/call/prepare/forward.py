"""Forwards that are prepared: which kernels compute a call, and their launches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import SpecError
from ...runtime.launch import prepare
from ...runtime.run_time import Extent, Scalars
from .. import decode, fragment_values, kernel_choice, made_mask, ongoing, schedule
from ..bias import extent_of
from ..checks import violations
from ..kernel_choice import Device
from ..numbers import Arguments
from ..ongoing import Ongoing
from ..operands import (
    extents_of,
    heads_of,
    layout_of,
    outputs_of,
    scalars_of,
    sequences_of,
    sources_of,
    spec_of,
    unpacked,
)
from ..prepared import Output, PreparedCall, lay_out_workspaces, refuse_addresses
from ..served import without_splits
from ..table import INPUTS, OPTIONAL
from ..tensors import Described, TensorDesc, dtype_name, is_fp8, named

UNUSED = ("o_parts", "lse_parts")  # workspaces that keys in one split do without
NO_KEY: dict[str, float | str] = {"off_by_one": 0.0, "learnable": "sink"}
"""Each LSE of a row that sees no key, −∞ of other softmaxes."""
Gathering = Callable[[Sequence[Any]], PreparedCall]


@dataclass(frozen=True, eq=False)
class Forward:
    """A forward as its kernels are chosen.

    q, k, v: views; optional: the tensors beside them, by their names; extents, scalars: run-time
    values of its kernels. gather: whether threads copy operands; alone: whether the kernel for the
    output alone serves it. joins: the output and LSE that it joins, None where it makes its own.
    table: the order of sequences that a schedule keeps.
    """

    q: TensorDesc
    k: TensorDesc
    v: TensorDesc
    optional: dict[str, TensorDesc | None]
    arguments: Arguments
    gather: bool
    alone: bool
    joins: Ongoing | None
    extents: dict[str, Extent]
    scalars: Scalars
    table: Described | None


def maxima_of(q: Described, arguments: Arguments) -> dict[str, int]:
    """Elements of the maxima of a call, 0 where nobody asks for them. q: a view."""
    sizes = dict.fromkeys(("amax_s", "amax_o"), int(arguments.amax))
    sizes["max_logit"] = heads_of(q, arguments) if arguments.max_logit else 0  # a symbol in a trace
    return sizes


def prepare_forward(
    operands: Sequence[TensorDesc | None],
    arguments: Arguments,
    device: Device,
    gathering: Gathering,
    gather: bool = False,
    alone: bool = False,
    joins: Ongoing | None = None,
    into: TensorDesc | None = None,
) -> PreparedCall:
    """Everything about a forward but addresses.

    operands: of `table.INPUTS`. gathering: gives, of operands of which one begins at no multiple of
    16 bytes, the call whose threads copy them; gather: whether this is that call. alone: where
    there is a kernel that writes the output alone, it is that one. joins: the output and LSE that
    are joined, whose tensors then follow the operands; into: where the output is written, likewise.

    Raises: SpecError with every violation; CompileError, LaunchError.
    """
    q, k, v, *rest = operands
    assert q is not None  # the operation's schema
    carriers, optional = {"q": q, "k": k, "v": v}, dict(zip(OPTIONAL, rest, strict=True))
    q, k, v = unpacked(q, k, v, arguments.layout)
    sequences = sequences_of(q, optional, arguments.layout)
    table = schedule.table_for(optional["schedule"], sequences, served=not gather)
    out, lse = outputs_of(q, v, arguments)
    written = into if joins is None else joins.o
    tensors = {"q": q, "k": k, "v": v, "o": out if written is None else written}
    extents = extents_of(tensors, arguments.layout)
    reasons = violations(tensors, extents, optional, arguments, gather)
    reasons += [] if joins is None else joins.violations(q, out, lse, sequences)
    reasons += [] if into is None else _misfits(into, out)
    if reasons:
        raise SpecError(reasons)
    given = zip(INPUTS, operands, strict=True)
    there = zip(ongoing.NAMES, joins.tensors if joins else (into, None, None, None), strict=True)
    prepared = PreparedCall(
        operands=tuple(
            (place, name) for place, (name, x) in enumerate((*given, *there)) if x is not None
        ),
        sources=(
            *sources_of(carriers, optional, arguments),
            *schedule.sources_of(table, "fwd"),
            *made_mask.sources_of(optional["attn_mask"], extents["q"].seq, extents["k"].seq),
        ),
        outputs=() if joins else _outputs(q, None if into else out, lse, arguments),
        device=device,
    )
    scalars = scalars_of(q, optional, arguments, extents)
    if joins:
        scalars = replace(scalars, numbers={**scalars.numbers, **joins.numbers})
    if not (q.numel() and k.numel() and out.numel() and scalars.sequences):
        return prepared
    call = Forward(q, k, v, optional, arguments, gather, alone, joins, extents, scalars, table)
    return _with_launches(prepared, call, gathering)


def _outputs(
    q: TensorDesc, out: TensorDesc | None, lse: TensorDesc, arguments: Arguments
) -> tuple[Output, ...]:
    """Outputs of a call that makes its own: output, if it is not there, LSE, and the maxima that it
    asks for."""
    sizes = maxima_of(q, arguments)
    maxima = {name: TensorDesc.contiguous((n,), "float32") for name, n in sizes.items()}
    lowest = {"max_logit": -math.inf}
    return (
        *(() if out is None else (Output.like("o", out, 0.0),)),
        Output.like("lse", lse, NO_KEY.get(arguments.softmax, -math.inf)),
        *(
            Output.like(name, x, lowest.get(name, 0.0), preset=True)
            for name, x in maxima.items()
            if x.numel()
        ),
    )


def _misfits(into: TensorDesc, out: TensorDesc) -> list[str]:
    """Why a tensor is none for an output of this format."""
    if (dtype_name(into), into.shape) == (dtype_name(out), out.shape):
        return []  # the devices of all tensors are compared
    return [f"out needs {named(out)}, got {named(into)}"]


def _with_launches(prepared: PreparedCall, call: Forward, gathering: Gathering) -> PreparedCall:
    """The forward with launches of the kernels that this call takes.

    Raises: CompileError, LaunchError.
    """
    q, optional, arguments, extents = call.q, call.optional, call.arguments, call.extents
    sequences = call.scalars.sequences
    if (added := optional["bias"]) is not None:
        extents["bias"] = extent_of(added, sequences or 0, extents["q"].heads)
    spec = spec_of(q, call.k, call.v, optional, arguments, call.gather)
    if call.joins:
        spec = replace(spec, continues=True, decode=False)
    if not arguments.num_splits:
        spec = without_splits(spec, prepared.device.known_arch)
    unaligned: Gathering | None = refuse_addresses
    if spec.gathers:
        unaligned = None
    elif not is_fp8(q) and not layout_of(arguments.layout).paged:
        unaligned = gathering
    asked, splits = arguments.num_splits, 1
    wants: tuple[str, ...] = ("o",) if call.alone else ("o", "lse")
    device = prepared.device
    choice = kernel_choice.choose(spec, device, extents, call.scalars, wants, splits=asked)
    kernels = kernel_choice.kernels_of(spec, device, choice)
    if spec.decode:
        reader, *_ = kernels
        splits = decode.splits_of(reader, extents, optional, call.scalars, asked)
        wants = decode.results_of(splits)
    kernels, unwritten = kernel_choice.launched(kernels, wants, sequences)
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
    absent = {*UNUSED, *_absent(prepared, call), *unwritten}
    return replace(
        prepared,
        fixed=dict.fromkeys(sorted(absent & named), 0),
        launches=launches,
        offsets=offsets,
        workspace_bytes=size,
        counts_tiles=any("tile_counter" in each.kernel.workspace for each in kernels),
        unaligned=unaligned,
    )


def _absent(prepared: PreparedCall, call: Forward) -> list[str]:
    """Operands and results that a call has not."""
    present = {name for _, name in prepared.operands} | {*prepared.names}
    names = (*INPUTS, *ongoing.NAMES, *maxima_of(call.q, call.arguments))
    absent = [name for name in names if name not in present]
    return [*absent, *fragment_values.absent_from(call.optional, call.arguments)]
