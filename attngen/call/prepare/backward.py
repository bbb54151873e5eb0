"""Backwards that are prepared: which kernels make the gradients of a call, and their launches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from ...errors import SpecError
from ...kernels.selection import made_by, maker_of, read_by
from ...runtime.launch import prepare
from ...runtime.load import LoadedKernel
from ...runtime.run_time import Extent, Scalars
from .. import (
    bias_gradient,
    fp8_gradients,
    fragment_values,
    kept_ds,
    kernel_choice,
    made_mask,
    schedule,
    sinks,
)
from ..bias import extent_of
from ..bias_gradient import BiasGradient, FusedBiasGradient, Scores
from ..checks import device_violations, violations
from ..gradient_kernels import (
    GRADIENTS,
    ROWS,
    adds_bias,
    learned_of,
    names_of,
    of_given,
    results_of,
    written_by,
)
from ..head_split import TOGETHER, HeadSplit, split_heads
from ..kernel_choice import Device
from ..learned_sums import learned_sums
from ..memory import order_in
from ..numbers import Arguments
from ..operands import (
    extents_of,
    output_dtype,
    outputs_of,
    packed_sources,
    scalars_of,
    sources_of,
    spec_of,
    unpacked,
)
from ..prepared import Launches, Output, lay_out_workspaces
from ..served import of_backward
from ..table import CARRIERS, OPTIONAL, WantedGradients
from ..tensors import Described, TensorDesc, dtype_name, is_fp8, named

DTYPES = ("float16", "bfloat16")
# Parameters that kernels may do without: gradients and maxima that nobody wants, schedules of few
# sequences.
UNREAD = (*GRADIENTS, "dlearned", *fp8_gradients.MAXIMA, *schedule.PARTS["bwd"])
READ = ("d_o", "o", *CARRIERS)  # by the copy engine
CARRIER_OF = dict(zip(GRADIENTS, CARRIERS, strict=True))
Tensors = Mapping[str, "TensorDesc | None"]


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedBackward(Launches):
    """A backward for all that differ from it in addresses alone, beside its launches.

    names: of its tensors, in their order. arguments: the call's. outputs: the gradients that
    launches write, contiguous, zero where there are none; returned: those of q, k and v that are
    wanted; learned: those of other operands; dbias: how kernels leave the bias'. gathers: whether
    operands begin anywhere; read: places of the tensors that the copy engine reads where they do
    not. rows: where kernels leave LSE and D, None where they do not; resets_rows: those are wanted,
    and kernels leave out what belongs to no sequence; counts: bytes of the workspace, from one to
    before another, that must be zero; resets: whether kernels need some of the workspace prepared.
    """

    names: tuple[str, ...]
    arguments: Arguments
    outputs: tuple[Output, ...]
    returned: tuple[str, ...]
    gathers: bool
    learned: tuple[str, ...]
    dbias: BiasGradient | None
    rows: sinks.WorkspaceRows | None = None
    resets_rows: bool = False
    counts: tuple[int, int] | None = None
    resets: bool = False
    read: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        read = tuple([place for place, name in enumerate(self.names) if name in READ])
        self._point((*self.names, *[output.name for output in self.outputs]), read=read)


@dataclass(frozen=True, eq=False)
class Backward:
    """A backward as its kernels are chosen.

    given: its tensors by their names; carriers: those of q, k and v that there are, as gradients
    have their formats; extents, scalars: what kernels know of them; dbias: how the gradient of the
    bias is made; gather: whether threads copy operands; mixed: whether products of weights and of
    dS have 16 bits beside operands of 8.
    """

    given: Tensors
    arguments: Arguments
    wanted: WantedGradients
    gather: bool
    carriers: Tensors
    extents: dict[str, Extent]
    scalars: Scalars
    dbias: BiasGradient | None
    mixed: bool

    @property
    def optional(self) -> dict[str, TensorDesc | None]:
        """The tensors beside q, k and v."""
        return {name: self.given[name] for name in OPTIONAL}

    @property
    def scores(self) -> Scores:
        """Sizes of its scores."""
        q, k = self.extents["q"], self.extents["k"]
        return Scores(self.scalars.sequences or 0, q.heads, q.seq, k.seq)

    @property
    def carried(self) -> tuple[str, ...]:
        """Gradients of q, k and v that kernels are to make, for themselves or for others."""
        results = results_of(self.wanted)
        carriers = ((name, self.carriers[CARRIER_OF[name]]) for name in GRADIENTS)
        return tuple(name for name, x in carriers if name in results and x is not None)

    def new(self, names: tuple[str, ...]) -> tuple[Output, ...]:
        """Outputs for these of the gradients of q, k and v, and for that of the bias."""
        made = {name: present(self.carriers[CARRIER_OF[name]]) for name in names}
        if self.dbias is not None:
            made["dbias"] = self.dbias.new(present(self.given["bias"]))
        return tuple(Output.like(name, x, 0.0) for name, x in made.items())


@dataclass(frozen=True, eq=False)
class Chosen:
    """The kernels of a backward, in the order of their launches.

    table: the order of sequences that a schedule keeps; unwritten: schedules that nobody writes.
    """

    kernels: tuple[LoadedKernel, ...]
    of_bias: FusedBiasGradient
    apart: HeadSplit
    table: Described | None
    unwritten: tuple[str, ...]


def prepare_backward(
    given: Tensors,
    arguments: Arguments,
    wanted: WantedGradients,
    gather: bool,
    device: Device,
    *,
    mixed: bool = False,
) -> PreparedBackward:
    """Everything about a backward but addresses.

    given: its tensors by their names, those of `table.INPUTS` with d_o, o, lse and dlse, None for
    what it has not; gather, mixed: as of `Backward`.

    Raises: SpecError with every violation; CompileError, LaunchError.
    """
    call = read(given, arguments, wanted, gather, mixed=mixed)
    q, k, v = unpacked(present(given["q"]), given["k"], given["v"], arguments.layout)
    carriers, wanted = call.carriers, call.wanted
    returned = tuple(name for name in names_of(wanted) if carriers[CARRIER_OF[name]] is not None)
    extra = fp8_gradients.maxima(arguments) if is_fp8(q) else ()
    sums = learned_sums(given, arguments) if wanted.dlearned else ()
    absent = [name for name, x in given.items() if x is None]
    absent += fragment_values.absent_from(call.optional, arguments)
    prepared = PreparedBackward(
        device=device,
        names=tuple(name for name, x in given.items() if x is not None),
        outputs=(*call.new(call.carried), *extra, *sums),
        arguments=arguments,
        returned=(*returned, *(each.name for each in extra)),
        fixed=dict.fromkeys((*UNREAD, *absent), 0),
        gathers=gather,
        learned=learned_of(wanted),
        dbias=call.dbias,
    )
    tensors = (q, k, v, present(given["o"]), present(given["d_o"]))
    if not (call.scalars.sequences and all(tensor.numel() for tensor in tensors)):
        return prepared
    return _with_launches(prepared, call, choose(call, device, q, k, v))


def read(
    given: Tensors,
    arguments: Arguments,
    wanted: WantedGradients,
    gather: bool,
    *,
    mixed: bool = False,
) -> Backward:
    """The backward that is asked for, whose kernels are not chosen yet. Arguments as of
    `prepare_backward`. Raises: SpecError with every violation."""
    layout, wanted = arguments.layout, of_given(wanted, given)
    q, k, v = unpacked(present(given["q"]), given["k"], given["v"], layout)
    tensors = {"q": q, "k": k, "v": v, "o": present(given["o"]), "d_o": present(given["d_o"])}
    extents, optional = extents_of(tensors, layout), {name: given[name] for name in OPTIONAL}
    rows = {name: x for name in ("lse", "dlse") if (x := given[name]) is not None}
    reasons = violations(tensors, extents, optional, arguments, gather)
    reasons += device_violations({"q": q, **rows})
    eight_bits = partial(fp8_gradients.violations, tensors, given, arguments, mixed=mixed)
    own = eight_bits() if is_fp8(q) else None
    if reasons := [*reasons, *(own or _mismatches(tensors, rows, arguments))]:
        raise SpecError(reasons)
    scalars, dbias = scalars_of(q, optional, arguments, extents), None
    sequences, heads_q = scalars.sequences or 0, extents["q"].heads
    if wanted.dbias:
        full = Scores(sequences, heads_q, extents["q"].seq, extents["k"].seq)
        dbias = bias_gradient.gradient_of(present(given["bias"]), full)
        scalars = replace(scalars, numbers={**scalars.numbers, **dbias.numbers})
    if (added := optional["bias"]) is not None:
        extents["bias"] = extent_of(added, sequences, heads_q)
    dtype = output_dtype(q, arguments)
    new = partial(_new, given, arguments, dtype)
    carriers = {name: None if given[name] is None else new(name) for name in CARRIERS}
    return Backward(given, arguments, wanted, gather, carriers, extents, scalars, dbias, mixed)


def choose(call: Backward, device: Device, q: TensorDesc, k: TensorDesc, v: TensorDesc) -> Chosen:
    """The kernels of a backward, whose q, k and v are views. Raises: CompileError, LaunchError."""
    extents, scalars = call.extents, call.scalars
    forward = spec_of(q, k, v, call.optional, call.arguments, call.gather)
    if is_fp8(q):
        tensors = {name: present(call.given[name]) for name in ("o", "d_o")}
        gradients = output_dtype(q, call.arguments)
        forward = fp8_gradients.spec_of_gradients(forward, tensors, gradients, call.mixed)
    else:
        forward = of_backward(forward)
    spec = replace(
        forward, directions=("bwd",), deterministic=call.arguments.deterministic, decode=False
    )
    served = spec_of(q, k, v, call.optional, call.arguments).gathers == call.gather
    table = schedule.table_for(call.given["schedule"], scalars.sequences or 0, served)
    find = partial(kernel_choice.choose, spec, device, extents, scalars, results_of(call.wanted))
    choice = find(scheduled=table is not None)
    kernels = kernel_choice.kernels_of(spec, device, choice)
    if choice.splits_heads and not any(each.kernel.dkv_floats for each in kernels):
        choice = find(scheduled=True)  # as if: those of an earlier version have no sums
        kernels = kernel_choice.kernels_of(spec, device, choice)
    of_bias = FusedBiasGradient()
    if call.dbias:
        extents["dbias"] = call.dbias.extent
        before_scale = call.arguments.bias_type == "pre_scale"
        of_bias = bias_gradient.fused_by(kernels, call.dbias, call.scores, before_scale)
    kernels = bias_gradient.considered(kernels, call.dbias, of_bias)
    kernels = kept_ds.considered(kernels, extents)
    kernels, unwritten = kernel_choice.launched(kernels, results_of(call.wanted), scalars.sequences)
    if not any(map(adds_bias, kernels)):
        of_bias = FusedBiasGradient()
    splits = choice.splits_heads
    apart = split_heads(kernels, extents, scalars.sequences or 0) if splits else TOGETHER
    return Chosen(kernels, of_bias, apart, table, unwritten)


def _with_launches(prepared: PreparedBackward, call: Backward, chosen: Chosen) -> PreparedBackward:
    """The backward with launches of the kernels that were chosen."""
    extents, layout, carriers = call.extents, call.arguments.layout, call.carriers
    kernels, of_bias, apart, table = chosen.kernels, chosen.of_bias, chosen.apart, chosen.table
    gradients = unpacked(present(carriers["q"]), carriers["k"], carriers["v"], layout)
    extents |= extents_of(dict(zip(GRADIENTS, gradients, strict=True)), layout)
    kept = kept_ds.kept_by(kernels, extents)
    written = tuple(name for name in written_by(kernels) if carriers[CARRIER_OF[name]] is not None)
    scalars = replace(
        call.scalars,
        numbers={
            **call.scalars.numbers,
            **of_bias.numbers,
            **apart.numbers,
            **schedule.numbers_of(table),
            **fp8_gradients.key_tiles(kernels, extents["k"], call.scalars.sequences or 0),
            "main_follows": int(bool(call.carried)),
            **kept.numbers,
        },
    )
    packed = (
        (name, carrier, offset)
        for name, carrier, offset in packed_sources(carriers, layout, "d")
        if carrier in written
    )
    elsewhere = schedule.PARTS["bwd"] if table is not None else chosen.unwritten
    offsets, size = lay_out_workspaces(kernels, extents["q"], scalars, elsewhere=elsewhere)
    rows, counts = None, None
    if of_bias.counts_bytes:
        first = offsets["dbias_turns"]
        counts = first, first + of_bias.counts_bytes
    if apart.floats:
        first = offsets["dkv_acc"]
        counts = first, first + 4 * apart.floats
    if prepares := maker_of("lse_log2", kernels):
        rows = sinks.rows_of(prepares.kernel, offsets, extents["q"], scalars.sequences)
    resets_rows = rows is not None and {*ROWS} <= {*results_of(call.wanted)}
    resets_rows = resets_rows and any(each.kernel.q_seq != "dense" for each in kernels)
    return replace(
        prepared,
        outputs=(*call.new(written), *(x for x in prepared.outputs if x.preset)),
        sources=(
            *sources_of(call.given, call.optional, call.arguments),
            *schedule.sources_of(table, "bwd"),
            *made_mask.sources_of(call.given["attn_mask"], extents["q"].seq, extents["k"].seq),
            *packed,
        ),
        launches=tuple(
            prepare(each, extents, _scalars_for(each, scalars, of_bias, apart, numbers))
            for each, numbers in kept_ds.in_rounds(kernels, kept)
        ),
        offsets=offsets,
        workspace_bytes=size,
        counts_tiles=any("tile_counter" in each.kernel.workspace for each in kernels),
        rows=rows,
        counts=counts,
        resets_rows=resets_rows,
        resets=counts is not None or resets_rows,
    )


def present(tensor: TensorDesc | None) -> TensorDesc:
    """The tensor, which a call of checked arguments has."""
    assert tensor is not None
    return tensor


def _new(given: Tensors, arguments: Arguments, dtype: str, name: str) -> TensorDesc:
    """The gradient of an operand, without gaps; contiguous where it is packed, or has 8 bits."""
    tensor = present(given[name])
    order = "" if is_fp8(tensor) else order_in(arguments, name)
    return TensorDesc.ordered(tensor.shape, order if len(order) == tensor.ndim else "", dtype)


def _scalars_for(
    each: LoadedKernel,
    scalars: Scalars,
    of_bias: FusedBiasGradient,
    apart: HeadSplit,
    round_numbers: Mapping[str, int],
) -> Scalars:
    """Run-time values of one kernel: what converts sums of dQ finds them scaled where dS was; heads
    of a group may have tiles of their own; a round has some of the heads."""
    numbers = {**scalars.numbers, **round_numbers}
    if "dq_acc" in read_by(each.kernel):
        numbers |= apart.rounding
        numbers |= {"scaled_sums": 1} if of_bias.scaled else {}
    elif each.kernel.dkv_floats or "kv_schedule" in made_by(each.kernel):
        numbers |= apart.main
    return replace(scalars, numbers=numbers)


def _mismatches(
    tensors: Mapping[str, TensorDesc], rows: Mapping[str, TensorDesc], arguments: Arguments
) -> Iterator[str]:
    """Why tensors do not fit q, k and v."""
    q, v = tensors["q"], tensors["v"]
    if q.dtype not in DTYPES or output_dtype(q, arguments) not in (q.dtype, "float32"):
        yield "the backward takes float16 and bfloat16, and makes gradients of their dtype or " + (
            f"float32; q is {q.dtype}, out_dtype is {arguments.out_dtype}"
        )
        return
    out, lse = outputs_of(q, v, arguments._replace(out_dtype=None))
    expected = {"o": out, "d_o": out, **dict.fromkeys(rows, lse)}
    found = {**tensors, **rows}
    for name, like in expected.items():
        x = found[name]
        if (dtype_name(x), x.shape) != (like.dtype, like.shape):
            yield f"{name} needs {named(like)}, got {named(x)}"
