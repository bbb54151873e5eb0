"""Backwards that are prepared: which kernels make the gradients of a call, and their launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ...call import fragment_values
from ...call.bias import extent_of
from ...call.numbers import Arguments
from ...call.operands import extents_of, packed_sources, scalars_of, sources_of, spec_of, unpacked
from ...call.table import CARRIERS, OPTIONAL, WantedGradients
from ...errors import SpecError
from ...kernels.selection import made_by, maker_of, read_by
from ...runtime.launch import prepare
from ...runtime.load import LoadedKernel
from ...runtime.run_time import Extent, Scalars
from . import bias, schedule, sinks
from .checks import device_violations, violations
from .gradient_kernels import GRADIENTS, adds_bias, names_of, results_of, written_by
from .head_split import TOGETHER, HeadSplit, split_heads
from .kernel_choice import choose, launched
from .operation import Launches, Output, kernels_of, lay_out_workspaces
from .outputs import new_outputs, output_dtype

DTYPES = (torch.float16, torch.bfloat16)
# What kernels may do without: gradients that nobody wants, schedules of few sequences.
UNREAD = (*GRADIENTS, *schedule.PARTS["bwd"])
CARRIER_OF = dict(zip(GRADIENTS, CARRIERS, strict=True))
Tensors = dict[str, "Tensor | None"]


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedBackward(Launches):
    """A backward for all that differ from it in addresses alone, beside its launches.

    names: of its tensors, in their order. outputs: the gradients that launches write, contiguous,
    zero where there are none; returned: those of q, k and v that are wanted; of_sink, dbias:
    whether and how those of sink and bias are. gathers: whether operands begin anywhere. fixed:
    addresses that are the same for all. rows: where kernels leave LSE and D; fills_rows: they leave
    out those that belong to no sequence; d_unit: what D is relative to; counts: of the workspace,
    what must be zero.
    """

    names: tuple[str, ...]
    outputs: tuple[Output, ...]
    returned: tuple[str, ...]
    fixed: dict[str, int]
    gathers: bool
    of_sink: bool
    dbias: bias.Gradient | None
    rows: sinks.WorkspaceRows | None = None
    fills_rows: bool = False
    d_unit: float = 1.0
    counts: slice | None = None

    @property
    def resets(self) -> bool:
        """Whether kernels need some of the workspace prepared."""
        return self.counts is not None or self.of_sink and self.rows is not None and self.fills_rows

    def reset(self, workspace: Tensor) -> None:
        """Prepare that part of the workspace."""
        if self.counts:
            workspace[self.counts].zero_()
        if self.of_sink and self.rows and self.fills_rows:
            self.rows.reset(workspace)


@dataclass(frozen=True, eq=False)
class Backward:
    """A backward as its kernels are chosen.

    given: its tensors by their names; carriers: those of q, k and v that there are, as gradients
    have their formats; extents, scalars: what kernels know of them; dbias: how the gradient of the
    bias is made; gather: whether threads copy operands.
    """

    given: Tensors
    arguments: Arguments
    wanted: WantedGradients
    gather: bool
    carriers: Tensors
    extents: dict[str, Extent]
    scalars: Scalars
    dbias: bias.Gradient | None

    @property
    def optional(self) -> Tensors:
        """The tensors beside q, k and v."""
        return {name: self.given[name] for name in OPTIONAL}

    def new(self, names: tuple[str, ...]) -> tuple[Output, ...]:
        """Outputs for these of the gradients of q, k and v, and for that of the bias."""
        made = {name: present(self.carriers[CARRIER_OF[name]]) for name in names}
        if self.dbias is not None:
            made["dbias"] = self.dbias.new(present(self.given["bias"]).to("meta"))
        return tuple(Output.like(name, x, 0.0) for name, x in made.items())


@dataclass(frozen=True, eq=False)
class Chosen:
    """The kernels of a backward, in the order of their launches.

    table: the order of sequences that a schedule keeps; unwritten: schedules that nobody writes.
    """

    kernels: tuple[LoadedKernel, ...]
    of_bias: bias.FusedBiasGradient
    apart: HeadSplit
    table: Tensor | None
    unwritten: tuple[str, ...]


def prepare_backward(
    given: Tensors, arguments: Arguments, wanted: WantedGradients, gather: bool
) -> PreparedBackward:
    """Everything about a backward but addresses. given: its tensors by their names, None for what
    it has not; gather: whether threads copy operands.

    Raises: SpecError with every violation; CompileError, LaunchError.
    """
    layout = arguments.layout
    q, k, v = unpacked(present(given["q"]), given["k"], given["v"], layout)
    tensors = {"q": q, "k": k, "v": v, "o": present(given["o"]), "d_o": present(given["d_o"])}
    extents, optional = extents_of(tensors, layout), {name: given[name] for name in OPTIONAL}
    rows = {name: x for name in ("lse", "dlse") if (x := given[name]) is not None}
    reasons = violations(tensors, extents, optional, arguments, gather)
    reasons += device_violations({"q": q, **rows})
    if reasons := [*reasons, *_mismatches(tensors, rows, arguments)]:
        raise SpecError(reasons)
    scalars, dbias = scalars_of(q, optional, arguments, extents), None
    sequences, heads_q = scalars.sequences or 0, extents["q"].heads
    if wanted.dbias:
        full = (sequences, heads_q, extents["q"].seq, extents["k"].seq)
        dbias = bias.gradient_of(present(given["bias"]), full)
        scalars = replace(scalars, numbers={**scalars.numbers, **dbias.numbers})
    if (added := optional["bias"]) is not None:
        extents["bias"] = extent_of(added, sequences, heads_q)
    carriers = {n: None if (x := given[n]) is None else _new(x) for n in "qkv"}
    call = Backward(given, arguments, wanted, gather, carriers, extents, scalars, dbias)
    returned = tuple(name for name in names_of(wanted) if carriers[CARRIER_OF[name]] is not None)
    absent = [name for name, x in given.items() if x is None]
    absent += fragment_values.absent_from(optional, arguments)
    prepared = PreparedBackward(
        device=q.device,
        names=tuple(name for name, x in given.items() if x is not None),
        outputs=call.new(returned),
        returned=returned,
        fixed=dict.fromkeys((*UNREAD, *absent), 0),
        gathers=gather,
        of_sink=wanted.dsink,
        dbias=dbias,
    )
    if not (sequences and all(tensor.numel() for tensor in tensors.values())):
        return prepared
    return _with_launches(prepared, call, _choose(call, q, k, v))


def _choose(call: Backward, q: Tensor, k: Tensor, v: Tensor) -> Chosen:
    """The kernels of a backward, whose q, k and v are views. Raises: CompileError, LaunchError."""
    extents, scalars = call.extents, call.scalars
    forward = spec_of(q, k, v, call.optional, call.arguments, call.gather)
    spec = replace(
        forward, directions=("bwd",), deterministic=call.arguments.deterministic, decode=False
    )
    served = spec_of(q, k, v, call.optional, call.arguments).gathers == call.gather
    table = schedule.table_for(call.given["schedule"], scalars.sequences or 0, served)
    find = partial(choose, spec, q.device, extents, scalars, results_of(call.wanted))
    choice = find(scheduled=table is not None)
    kernels = kernels_of(spec, q.device, choice)
    if choice.splits_heads and not any(each.kernel.dkv_floats for each in kernels):
        choice = find(scheduled=True)  # as if: those of an earlier version have no sums
        kernels = kernels_of(spec, q.device, choice)
    of_bias = bias.FusedBiasGradient()
    if call.dbias:
        extents["dbias"] = call.dbias.extent
        full = (scalars.sequences or 0, extents["q"].heads, extents["q"].seq, extents["k"].seq)
        before_scale = call.arguments.bias_type == "pre_scale"
        of_bias = bias.added_of(kernels, call.dbias, full, before_scale)
    if not of_bias.terms:
        kernels = tuple(each for each in kernels if not adds_bias(each))
    kernels, unwritten = launched(kernels, results_of(call.wanted), scalars.sequences)
    if not any(map(adds_bias, kernels)):
        of_bias = bias.FusedBiasGradient()
    splits = choice.splits_heads
    apart = split_heads(kernels, extents, scalars.sequences or 0) if splits else TOGETHER
    return Chosen(kernels, of_bias, apart, table, unwritten)


def _with_launches(prepared: PreparedBackward, call: Backward, chosen: Chosen) -> PreparedBackward:
    """The backward with launches of the kernels that were chosen."""
    extents, layout, carriers = call.extents, call.arguments.layout, call.carriers
    kernels, of_bias, apart, table = chosen.kernels, chosen.of_bias, chosen.apart, chosen.table
    gradients = unpacked(present(carriers["q"]), carriers["k"], carriers["v"], layout)
    extents |= extents_of(dict(zip(GRADIENTS, gradients, strict=True)), layout)
    written = tuple(name for name in written_by(kernels) if carriers[CARRIER_OF[name]] is not None)
    scalars = replace(
        call.scalars,
        numbers={
            **call.scalars.numbers,
            **of_bias.numbers,
            **apart.numbers,
            **schedule.numbers_of(table),
            "main_follows": int(call.wanted.dq or call.wanted.dkv),
        },
    )
    packed = (
        (name, carrier, offset)
        for name, carrier, offset in packed_sources(carriers, layout, "d")
        if carrier in written
    )
    elsewhere = schedule.PARTS["bwd"] if table is not None else chosen.unwritten
    offsets, size = lay_out_workspaces(kernels, extents["q"], scalars, elsewhere=elsewhere)
    of_sink, counts = None, None
    if of_bias.counts_bytes:
        first = offsets["dbias_turns"]
        counts = slice(first, first + of_bias.counts_bytes)
    if apart.floats:
        first = offsets["dkv_acc"]
        counts = slice(first, first + 4 * apart.floats)
    if prepares := maker_of("lse_log2", kernels):
        of_sink = sinks.rows_of(prepares.kernel, offsets, extents["q"], scalars.sequences)
    return replace(
        prepared,
        outputs=call.new(written),
        sources=(
            *sources_of(call.given, call.optional, call.arguments),
            *schedule.sources_of(table, "bwd"),
            *packed,
        ),
        launches=tuple(
            prepare(each, extents, _scalars_for(each, scalars, of_bias, apart)) for each in kernels
        ),
        offsets=offsets,
        workspace_bytes=size,
        counts_tiles=any("tile_counter" in each.kernel.workspace for each in kernels),
        rows=of_sink,
        counts=counts,
        fills_rows=any(each.kernel.q_seq != "dense" for each in kernels),
        d_unit=scalars.numbers["keep_scale"],  # with dropout
    )


def present(tensor: Tensor | None) -> Tensor:
    """The tensor, which a call of checked arguments has."""
    assert tensor is not None
    return tensor


def _new(tensor: Tensor) -> Tensor:
    """A gradient of the tensor, of which only the format counts."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _scalars_for(
    each: LoadedKernel, scalars: Scalars, of_bias: bias.FusedBiasGradient, apart: HeadSplit
) -> Scalars:
    """Run-time values of one kernel: what converts sums of dQ finds them scaled where dS was; heads
    of a group may have tiles of their own."""
    numbers = {**scalars.numbers}
    if "dq_acc" in read_by(each.kernel):
        numbers |= apart.rounding
        numbers |= {"scaled_sums": 1} if of_bias.scaled else {}
    elif each.kernel.dkv_floats or "kv_schedule" in made_by(each.kernel):
        numbers |= apart.main
    return replace(scalars, numbers=numbers)


def _mismatches(
    tensors: dict[str, Tensor], rows: dict[str, Tensor], arguments: Arguments
) -> Iterator[str]:
    """Why tensors do not fit q, k and v."""
    q, v = tensors["q"], tensors["v"]
    if q.dtype not in DTYPES or output_dtype(q, arguments) != q.dtype:
        yield "the backward takes float16 and bfloat16, with an output of their dtype; " + (
            f"q is {q.dtype}, out_dtype is {arguments.out_dtype}"
        )
        return
    out, lse = new_outputs(q.to("meta"), v.to("meta"), arguments)
    expected = {"o": out, "d_o": out, **dict.fromkeys(rows, lse)}
    found = {**tensors, **rows}
    for name, like in expected.items():
        x = found[name]
        if (x.dtype, x.shape) != (like.dtype, like.shape):
            yield f"{name} needs {like.dtype} {list(like.shape)}, got {x.dtype} {list(x.shape)}"
