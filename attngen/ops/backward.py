"""The operation `attngen::backward`: gradients of 16-bit attention, by compiled kernels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import load
from ..errors import SpecError
from ..launch import prepare
from ..spec import AttentionSpec
from . import bias, schedule, sinks
from .checks import device_violations, violations
from .narrow import is_narrow
from .needed import GRADIENTS, names_of, needed, preparing, unordered, written_by
from .operands import (
    boxed,
    extents_of,
    new_outputs,
    packed_sources,
    scalars_of,
    sources_of,
    spec_of,
    unpacked,
)
from .operation import (
    Launches,
    format_of,
    kernels_of,
    lay_out_workspaces,
    library,
    locate,
    remember,
    start,
)
from .signature import OPTIONAL, Arguments, Wanted, schema, split, wanted_of

DTYPES = (torch.float16, torch.bfloat16)

library.define(
    "backward(Tensor d_o, Tensor? dlse, Tensor q, Tensor? k, Tensor? v, Tensor o, Tensor lse, "
    f"{schema()}, bool want_dq=True, bool want_dkv=True, bool want_dsink=True, "
    "bool want_dbias=True) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Ready(Launches):
    """What calls of equal shapes, strides and arguments share beside their launches: the gradients
    that these write, which are zero where there are none. rows: where kernels leave LSE and D;
    fills_rows: they leave out those that belong to no sequence; d_unit: what D is relative to."""

    gradients: tuple[str, ...]
    rows: sinks.Rows | None = None
    fills_rows: bool = False
    d_unit: float = 1.0
    dbias: bias.Gradient | None = None


# What kernels may do without: gradients that nobody wants, schedules of few sequences.
UNREAD = (*GRADIENTS, *schedule.PARTS["bwd"])
_ready: dict[tuple[Any, ...], Ready] = {}
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
    gather = not all(readable(x) for x in (q, k, v) if x is not None) or _odd(q) or _odd(o)
    if not gather:
        o, d_o = copied(o), copied(d_o)
    given: Tensors = {"q": q, "k": k, "v": v, "o": o, "d_o": d_o}
    given |= {"lse": lse.contiguous(), "dlse": None if dlse is None else dlse.float().contiguous()}
    given |= dict(zip(OPTIONAL, optional, strict=True))
    wanted = wanted._replace(
        dsink=wanted.dsink and given["sink"] is not None,
        dbias=wanted.dbias and given["bias"] is not None,
    )
    key = (arguments, wanted, gather, *map(format_of, given.values()))
    ready = remember(_ready, key, lambda: _make_ready(given, arguments, wanted, gather))
    with torch.cuda.device(q.device):
        load.ensure_context(q.device.index)
        made = {name: _gradient_of(_present(given[name[1]])) for name in ready.gradients}
        if ready.dbias:
            made["dbias"] = ready.dbias.new(_present(given["bias"]))
        dsink = _run(ready, {**given, **made}, wanted)
        dbias = ready.dbias.finish(made["dbias"], q.dtype) if ready.dbias else q.new_empty(0)
    names = [name for name in names_of(wanted) if name in made]
    dq, dk, dv = (made[name] if name in names else q.new_empty(0) for name in GRADIENTS)
    return dq, dk, dv, dsink, dbias


def _gradient_of(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


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


def _run(ready: Ready, given: Tensors, wanted: Wanted) -> Tensor:
    """Fills the gradients among the given tensors, on the current stream; returns that of the
    sink."""
    sink, lse = given["sink"] if wanted.dsink else None, _present(given["lse"])
    if not ready.launches:
        for name in (*ready.gradients, *(["dbias"] if ready.dbias else [])):
            _present(given[name]).zero_()
        if sink is None:
            return lse.new_empty(0)
        # No query sees a key: each LSE is its head's sink, but for rows of no sequence.
        if (dlse := given["dlse"]) is None:
            return sink.new_zeros(sink.shape)
        return dlse.masked_fill(lse == -math.inf, 0).sum(1 if dlse.ndim == 2 else (0, 2))
    addresses = dict.fromkeys(UNREAD, 0)
    addresses |= {name: 0 if x is None else x.data_ptr() for name, x in given.items()}
    locate(ready, addresses)
    rows = ready.rows if sink is not None else None
    workspace = start(ready, addresses, rows.reset if rows and ready.fills_rows else None)
    if sink is None or rows is None:
        return lse.new_empty(0)
    return sinks.gradient(sink, rows, _present(workspace)).mul_(ready.d_unit)


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
    carriers = {n: None if (x := given[n]) is None else _gradient_of(x.to("meta")) for n in "qkv"}
    scalars = scalars_of(q, optional, arguments, extents)
    dbias = None
    if wanted.dbias:
        full = (scalars.sequences or 0, extents["q"].heads, extents["q"].seq, extents["k"].seq)
        dbias = bias.gradient_of(_present(given["bias"]), full)
        scalars = dataclasses.replace(scalars, numbers={**scalars.numbers, **dbias.numbers})
    if (added := optional["bias"]) is not None:
        extents["bias"] = bias.extent_of(added, scalars.sequences or 0, extents["q"].heads)
    if not (scalars.sequences and all(tensor.numel() for tensor in tensors.values())):
        written = tuple(n for n in names_of(wanted) if carriers[n[1]] is not None)
        return Ready(device=q.device, gradients=written, dbias=dbias)
    spec = _spec(tensors, optional, arguments, gather)
    narrow = wanted.dq and is_narrow(extents, scalars)
    kernels = needed(kernels_of(spec, q.device, narrow=narrow), wanted)
    written = tuple(name for name in written_by(kernels) if carriers[name[1]] is not None)
    gradients = unpacked(_present(carriers["q"]), carriers["k"], carriers["v"], layout)
    extents |= extents_of(dict(zip(GRADIENTS, gradients, strict=True)), layout)
    sources = sources_of(given, optional, layout)
    kernels, unwritten = unordered(kernels, scalars.sequences)
    served = spec_of(q, k, v, optional, arguments).gathers == gather
    table = schedule.table_for(optional["schedule"], scalars.sequences, served)
    numbers = {**scalars.numbers, **schedule.numbers_of(table)}
    scalars = dataclasses.replace(scalars, numbers=numbers)
    sources += schedule.sources_of(table, "bwd")
    sources += tuple(s for s in packed_sources(carriers, layout, "d") if s[1] in written)
    elsewhere = schedule.PARTS["bwd"] if table is not None else unwritten
    offsets, size = lay_out_workspaces(kernels, extents["q"], scalars, elsewhere=elsewhere)
    of_sink = None
    if prepares := preparing(kernels):
        of_sink = sinks.rows_of(prepares, offsets, extents["q"], scalars.sequences)
    return Ready(
        device=q.device,
        sources=sources,
        launches=tuple(prepare(each, extents, scalars) for each in kernels),
        offsets=offsets,
        workspace_bytes=size,
        counts_tiles=any("tile_counter" in each.kernel.workspace for each in kernels),
        gradients=written,
        rows=of_sink,
        fills_rows=any(each.kernel.q_seq != "dense" for each in kernels),
        d_unit=scalars.numbers["keep_scale"],  # with dropout
        dbias=dbias,
    )


def _mismatches(
    tensors: dict[str, Tensor], rows: dict[str, Tensor], arguments: Arguments
) -> Iterator[str]:
    """What does not fit q, k and v."""
    q, v = tensors["q"], tensors["v"]
    if q.dtype not in DTYPES or arguments.out_dtype not in (None, q.dtype):
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
torch.library.register_autograd("attngen::backward", _second_derivative, lib=library)
