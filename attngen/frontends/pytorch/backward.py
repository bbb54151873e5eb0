"""The operation `attngen::backward`: gradients of 16-bit attention, by compiled kernels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...call.table import INPUTS, OPTIONAL
from ...errors import SpecError
from ...runtime.launch import prepare
from ...runtime.load import LoadedKernel
from ...runtime.run_time import Scalars
from ...spec.attention_spec import AttentionSpec
from . import bias, schedule, sinks
from . import call_cache as recent
from . import head_split as heads
from . import routing as choice
from .checks import check_rows, device_violations, violations
from .gradient_kernels import (
    CONVERTS,
    GRADIENTS,
    ORDERS,
    choose_adding,
    family_of,
    names_of,
    needed,
    preparing,
    unordered,
    written_by,
)
from .narrow_windows import is_narrow
from .operands import (
    boxed,
    extents_of,
    new_outputs,
    output_dtype,
    packed_sources,
    scalars_of,
    sources_of,
    spec_of,
    unpacked,
)
from .operation import (
    Launches,
    Output,
    current,
    format_of,
    is_current,
    kernels_of,
    lay_out_workspaces,
    locate,
    new_tensor,
    remember,
    start,
)
from .registry import operator
from .signature import Arguments, Call, Wanted, places_of, schema, split, wanted_of
from .torch_private import is_plain
from .transforms import differentiable, refuse_tangents

DTYPES = (torch.float16, torch.bfloat16)

library = operator(
    "backward",
    "(Tensor d_o, Tensor? dlse, Tensor q, Tensor? k, Tensor? v, Tensor o, Tensor lse, "
    f"{schema()}, bool want_dq=True, bool want_dkv=True, bool want_dsink=True, "
    "bool want_dbias=True) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Ready(Launches):
    """What calls of equal shapes, strides and arguments share beside their launches.

    outputs: the gradients that these write, contiguous, zero where there are none; returned: those
    of q, k and v that are wanted, of_sink, dbias: whether and how those of sink and bias are.
    gathers: whether operands begin anywhere. fixed: addresses that are the same for all. rows:
    where kernels leave LSE and D; fills_rows: they leave out those that belong to no sequence;
    d_unit: what D is relative to; counts: of the workspace, what must be zero.
    """

    outputs: tuple[Output, ...]
    returned: tuple[str, ...]
    fixed: dict[str, int]
    gathers: bool
    of_sink: bool
    dbias: bias.Gradient | None
    rows: sinks.Rows | None = None
    fills_rows: bool = False
    d_unit: float = 1.0
    counts: slice | None = None

    @property
    def resets(self) -> bool:
        """Whether kernels need some of the workspace prepared."""
        return self.counts is not None or self.of_sink and self.rows is not None and self.fills_rows

    def reset(self, workspace: Tensor) -> None:
        """Prepares that."""
        if self.counts:
            workspace[self.counts].zero_()
        if self.of_sink and self.rows and self.fills_rows:
            self.rows.reset(workspace)


# What kernels may do without: gradients that nobody wants, schedules of few sequences.
UNREAD = (*GRADIENTS, *schedule.PARTS["bwd"])
READ = ("d_o", "o", "q", "k", "v")  # by the copy engine
_ready: dict[tuple[Any, ...], Ready] = {}
_recent: recent.Known[tuple[Ready, tuple[str, ...]]] = {}
Tensors = dict[str, Tensor | None]


def backward(
    d_o: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    o: Tensor,
    lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v, contiguous, in their dtype and packed as they are, of the sink and
    of the bias; [0] where they are not wanted, packed into another, or there is no such tensor.

    q, k, v and rest as `attngen::forward` took them, o and lse as it returned them, in 16 bits.
    d_o, dlse: gradients of o and of the LSE, None where nothing depends on it. want_dq …, after the
    rest: kernels that make unwanted gradients alone are left out.
    Raises: SpecError with every violation; CompileError, LaunchError.
    """
    (optional, arguments), wanted = split(rest), wanted_of(rest, k is None)
    operands = dict(zip(INPUTS, (q, k, v, *optional), strict=True))
    wanted = wanted._replace(
        dsink=wanted.dsink and operands["sink"] is not None,
        dbias=wanted.dbias and operands["bias"] is not None,
    )
    call = Call(arguments, places_of(tuple(operands.values())))
    present = [x for x in operands.values() if x is not None]
    found = differentiate(call, wanted, d_o, dlse, o, lse, present, dispatched=True)
    absent = (q, q, q, lse, q)  # of their dtypes
    names = zip((*GRADIENTS, "dsink", "dbias"), absent, strict=True)
    return tuple(found[name] if name in found else like.new_empty(0) for name, like in names)


def differentiate(
    call: Call,
    wanted: Wanted,
    d_o: Tensor,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    operands: list[Tensor],
    *,
    dispatched: bool = False,
) -> dict[str, Tensor]:
    """The gradients that are wanted, by their names, of a call that nobody looks on at. operands:
    those that it has. dispatched: by the operation, which else is asked where one is not plain.

    Raises: SpecError with every violation; CompileError, LaunchError.
    """
    if choice.CHECK_VALUES and call.by_name(operands)["bias"] is None and is_plain(lse):
        check_rows(lse)
    tensors = [d_o, o, lse, *operands]
    if dlse is not None:
        tensors.append(dlse)
    key = call, wanted, dlse is None
    known = recent.find(_recent, key, tensors)
    if known is not None:
        ready, names = known
        addresses = _addresses(ready, names, tensors)
        if ready.gathers or not any([addresses[name] % 16 for name in READ]):
            return _run(ready, dict(zip(names, tensors, strict=True)), addresses)
    if not (dispatched or all(map(is_plain, tensors))):
        return dispatch(call, wanted, d_o, dlse, o, lse, operands)
    there = {"d_o": d_o, "o": o, "lse": lse, **call.by_name(operands), "dlse": dlse}
    q, k, v = (there[name] for name in "qkv")
    boxes = not (_odd(_present(q)) or _odd(o)) and all(boxed(x) for x in (q, k, v) if x is not None)
    gather = not (boxes and all(readable(x) for x in (q, k, v) if x is not None))
    if not gather:
        there |= {"o": copied(o), "d_o": copied(d_o)}
    there["lse"] = lse.contiguous()
    if dlse is not None:
        there["dlse"] = dlse.float().contiguous()
    formats = (call.arguments, wanted, gather, *map(format_of, there.values()))
    ready = remember(_ready, formats, lambda: _make_ready(there, call.arguments, wanted, gather))
    given = {name: x for name, x in there.items() if x is not None}
    as_given = all(x is y for x, y in zip(given.values(), tensors, strict=True))
    if as_given and gather != boxes:  # formats, and not the addresses, say where it is read from
        recent.keep(_recent, key, tensors, (ready, tuple(given)))
    return _run(ready, given, _addresses(ready, given, given.values()))


def dispatch(
    call: Call,
    wanted: Wanted,
    d_o: Tensor | None,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    operands: list[Tensor],
) -> dict[str, Tensor]:
    """The same by the operation, for whoever looks on. Raises: SpecError, also for a tangent."""
    refuse_tangents((d_o, dlse))
    q, k, v, *optional = call.by_name(operands).values()
    found = _dispatched(
        *(torch.zeros_like(o) if d_o is None else d_o, dlse, q, k, v, o, lse),
        *(*optional, *call.arguments, *wanted),
    )
    return dict(zip((*GRADIENTS, "dsink", "dbias"), found, strict=True))


def _addresses(ready: Ready, names: Iterable[str], tensors: Iterable[Tensor]) -> dict[str, int]:
    addresses = ready.fixed.copy()
    for name, tensor in zip(names, tensors, strict=True):
        addresses[name] = tensor.data_ptr()
    return addresses


def readable(tensor: Tensor) -> bool:
    """Whether the copy engine can read a tensor where it is."""
    return tensor.data_ptr() % 16 == 0 and boxed(tensor)


def _odd(tensor: Tensor) -> bool:
    return tensor.shape[-1] % 8 != 0


def copied(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where the copy engine could not read it: autograd hands over what it
    has, such as one number expanded to a whole tensor, and kernels whose warps copy rows take
    longer than that."""
    return tensor if readable(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _run(ready: Ready, given: dict[str, Tensor], addresses: dict[str, int]) -> dict[str, Tensor]:
    """The gradients that are wanted, on the current stream. given: tensors that there are;
    addresses: theirs, and the fixed ones."""
    if not is_current(ready.device):
        with current(ready.device):
            return _run(ready, given, addresses)
    made = {}
    for output in ready.outputs:
        made[output.name] = tensor = new_tensor(output.sizes, output.strides, output.dtype)
        addresses[output.name] = tensor.data_ptr()
    found = {name: made[name] for name in ready.returned}
    if not ready.launches:
        for tensor in made.values():
            tensor.zero_()
        if ready.of_sink:
            found["dsink"] = _of_unseen(given["sink"], given["lse"], given.get("dlse"))
    else:
        locate(ready, addresses)
        rows = ready.rows if ready.of_sink else None
        workspace = start(ready, addresses, ready.reset if ready.resets else None)
        if rows:
            workspace = _present(workspace)
            found["dsink"] = sinks.gradient(given["sink"], rows, workspace, ready.d_unit)
    if ready.dbias:
        found["dbias"] = ready.dbias.finish(made["dbias"], given["q"].dtype)
    return found


def _of_unseen(sink: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """The gradient of a sink where no query sees a key: each LSE is its head's, but for rows of no
    sequence."""
    if dlse is None:
        return sink.new_zeros(sink.shape)
    return dlse.masked_fill(lse == -math.inf, 0).sum(1 if dlse.ndim == 2 else (0, 2))


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _make_ready(given: Tensors, arguments: Arguments, wanted: Wanted, gather: bool) -> Ready:
    layout = arguments.layout
    optional = {name: given[name] for name in OPTIONAL}
    q, k, v = unpacked(_present(given["q"]), given["k"], given["v"], layout)
    tensors = {"q": q, "k": k, "v": v, "o": _present(given["o"]), "d_o": _present(given["d_o"])}
    rows = {name: x for name in ("lse", "dlse") if (x := given[name]) is not None}
    extents = extents_of(tensors, layout)
    reasons = violations(tensors, extents, optional, arguments, gather)
    reasons += device_violations({"q": q, **rows})
    if reasons := [*reasons, *_mismatches(tensors, rows, arguments)]:
        raise SpecError(reasons)
    carriers = {n: None if (x := given[n]) is None else _new(x) for n in "qkv"}
    scalars = scalars_of(q, optional, arguments, extents)
    dbias = None
    if wanted.dbias:
        full = (scalars.sequences or 0, extents["q"].heads, extents["q"].seq, extents["k"].seq)
        dbias = bias.gradient_of(_present(given["bias"]), full)
        scalars = dataclasses.replace(scalars, numbers={**scalars.numbers, **dbias.numbers})
    if (added := optional["bias"]) is not None:
        extents["bias"] = bias.extent_of(added, scalars.sequences or 0, extents["q"].heads)
    wanted_here = tuple(name for name in names_of(wanted) if carriers[name[1]] is not None)
    new = {name: _present(carriers[name[1]]) for name in wanted_here}
    made = {} if dbias is None else {"dbias": dbias.new(_present(given["bias"]).to("meta"))}
    ready = Ready(
        device=q.device,
        outputs=_outputs({**new, **made}),
        returned=wanted_here,
        fixed=dict.fromkeys((*UNREAD, *(name for name, x in given.items() if x is None)), 0),
        gathers=gather,
        of_sink=wanted.dsink,
        dbias=dbias,
    )
    if not (scalars.sequences and all(tensor.numel() for tensor in tensors.values())):
        return ready
    spec = _spec(tensors, optional, arguments, gather)
    narrow = wanted.dq and not spec.deterministic and is_narrow(extents, scalars)
    served = spec_of(q, k, v, optional, arguments).gathers == gather
    table = schedule.table_for(optional["schedule"], scalars.sequences, served)
    # A table holds the order of all calls that it serves.
    parts = wanted.dq and wanted.dkv and table is None
    parts = parts and heads.have_few_tiles(spec, q.device, extents, scalars, narrow)
    kernels = needed(kernels_of(spec, q.device, narrow=narrow and not parts), wanted)
    if parts and not any(each.kernel.dkv_floats for each in kernels):  # an earlier version's
        parts, kernels = False, needed(kernels_of(spec, q.device, narrow=narrow), wanted)
    of_bias = bias.Added()
    if dbias:
        extents["dbias"] = dbias.extent
        of_bias = bias.added_of(kernels, dbias, full, arguments.bias_type == "pre_scale")
    kernels = choose_adding(kernels, of_bias.terms > 0)
    apart = heads.apart_of(kernels, extents, scalars.sequences) if parts else heads.TOGETHER
    written = tuple(name for name in written_by(kernels) if carriers[name[1]] is not None)
    gradients = unpacked(_present(carriers["q"]), carriers["k"], carriers["v"], layout)
    extents |= extents_of(dict(zip(GRADIENTS, gradients, strict=True)), layout)
    sources = sources_of(given, optional, layout)
    kernels, unwritten = unordered(kernels, scalars.sequences)
    numbers = {**scalars.numbers, **of_bias.numbers, **apart.numbers}
    numbers |= schedule.numbers_of(table)
    numbers |= {"main_follows": int(wanted.dq or wanted.dkv)}
    scalars = dataclasses.replace(scalars, numbers=numbers)
    sources += schedule.sources_of(table, "bwd")
    sources += tuple(s for s in packed_sources(carriers, layout, "d") if s[1] in written)
    elsewhere = schedule.PARTS["bwd"] if table is not None else unwritten
    offsets, size = lay_out_workspaces(kernels, extents["q"], scalars, elsewhere=elsewhere)
    of_sink, counts = None, None
    if of_bias.counts_bytes:
        first = offsets["dbias_turns"]
        counts = slice(first, first + of_bias.counts_bytes)
    if apart.floats:
        first = offsets["dkv_acc"]
        counts = slice(first, first + 4 * apart.floats)
    if prepares := preparing(kernels):
        of_sink = sinks.rows_of(prepares, offsets, extents["q"], scalars.sequences)
    new = {name: _present(carriers[name[1]]) for name in written}
    return dataclasses.replace(
        ready,
        outputs=_outputs({**new, **made}),
        sources=sources,
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


def _new(tensor: Tensor) -> Tensor:
    """A gradient of it, of which only the format counts."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _outputs(tensors: dict[str, Tensor]) -> tuple[Output, ...]:
    return tuple(Output.like(name, x, 0.0) for name, x in tensors.items())


def _scalars_for(
    each: LoadedKernel, scalars: Scalars, of_bias: bias.Added, apart: heads.Apart
) -> Scalars:
    """Those of one kernel: what converts sums of dQ finds them scaled where dS was; heads of a
    group may have tiles of their own."""
    numbers = {**scalars.numbers}
    if family_of(each) == CONVERTS:
        numbers |= apart.rounding
        numbers |= {"scale": 1.0} if of_bias.scaled else {}
    elif each.kernel.dkv_floats or family_of(each) == ORDERS:
        numbers |= apart.main
    return dataclasses.replace(scalars, numbers=numbers)


def _mismatches(
    tensors: dict[str, Tensor], rows: dict[str, Tensor], arguments: Arguments
) -> Iterator[str]:
    """What does not fit q, k and v."""
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


def _spec(
    tensors: dict[str, Tensor],
    optional: Mapping[str, Tensor | None],
    arguments: Arguments,
    gather: bool,
) -> AttentionSpec:
    q, k, v = (tensors[name] for name in "qkv")
    forward = spec_of(q, k, v, optional, arguments, gather)
    return dataclasses.replace(
        forward, directions=("bwd",), deterministic=arguments.deterministic, decode=False
    )


def _fake_backward(
    d_o: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor | None, v: Tensor | None, *others: Any
) -> tuple[Tensor, ...]:
    _o, lse, *rest = others
    optional, wanted = split(rest)[0], wanted_of(rest, k is None)
    names = names_of(wanted)
    pairs = zip(GRADIENTS, (q, k, v), strict=True)
    shapes = (0 if x is None or name not in names else x.shape for name, x in pairs)
    dq, dk, dv = (q.new_empty(shape) for shape in shapes)
    given = dict(zip(OPTIONAL, optional, strict=True))
    sink, added = given["sink"], given["bias"]
    dsink = lse.new_empty(0 if sink is None or not wanted.dsink else sink.shape)
    dbias = q.new_empty(0 if added is None or not wanted.dbias else added.shape)
    return dq, dk, dv, dsink, dbias


def _second_derivative(*_: Any) -> None:
    raise SpecError(
        "kernels have no second derivative (a gradient was made with create_graph=True and "
        "differentiated); pass backend='reference'"
    )


library.impl("backward", backward, "CUDA")
torch.library.register_fake("attngen::backward", _fake_backward, lib=library)
_dispatched = differentiable("backward", _second_derivative, library=library)
