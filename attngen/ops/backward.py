"""The operation `attngen::backward`: gradients of 16-bit attention, by compiled kernels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from .. import load
from ..errors import SpecError
from ..launch import Prepared, launch, prepare
from ..load import LoadedKernel
from ..run_time import LOG2_E, Extent, row_blocks
from ..spec import AttentionSpec
from . import bias
from .checks import device_violations, violations
from .operands import (
    Source,
    extents_of,
    new_outputs,
    packed_sources,
    scalars_of,
    sources_of,
    spec_of,
    unpacked,
)
from .operation import (
    format_of,
    kernels_of,
    lay_out_workspaces,
    library,
    remember,
    tile_counter,
)
from .signature import OPTIONAL, Arguments, Wanted, schema, split, wanted_of

GRADIENTS = ("dq", "dk", "dv")
DTYPES = (torch.float16, torch.bfloat16)

library.define(
    "backward(Tensor d_o, Tensor? dlse, Tensor q, Tensor? k, Tensor? v, Tensor o, Tensor lse, "
    f"{schema()}, bool want_dq=True, bool want_dkv=True, bool want_dsink=True, "
    "bool want_dbias=True) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@dataclass(frozen=True, eq=False)
class Ready:
    """What calls of equal shapes, strides and arguments share: the launches, in order, the
    gradients that they write, what points into the tensors of the call, and where each workspace
    lies in one allocation of so many bytes. fills_rows: kernels leave out rows of LSE and D that
    belong to no sequence; d_unit: what D in the workspace is relative to. No launches: the
    gradients are zero."""

    launches: tuple[Prepared, ...]
    gradients: tuple[str, ...]
    sources: tuple[Source, ...] = ()
    offsets: dict[str, int] = field(default_factory=dict)
    workspace_bytes: int = 0
    row_sizes: tuple[int, int, int] = (0, 0, 0)  # batch, heads, rows of LSE and D in the workspace
    fills_rows: bool = False
    d_unit: float = 1.0
    dbias: bias.Gradient | None = None


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
    given: Tensors = {"q": q, "k": k, "v": v, "o": readable(o), "d_o": readable(d_o)}
    given |= {"lse": lse.contiguous(), "dlse": None if dlse is None else dlse.float().contiguous()}
    given |= dict(zip(OPTIONAL, optional, strict=True))
    wanted = wanted._replace(
        dsink=wanted.dsink and given["sink"] is not None,
        dbias=wanted.dbias and given["bias"] is not None,
    )
    key = (arguments, wanted, *map(format_of, given.values()))
    ready = remember(_ready, key, lambda: _make_ready(given, arguments, wanted))
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


def names_of(wanted: Wanted) -> tuple[str, ...]:
    """Those of the gradients that kernels make."""
    return tuple(compress(GRADIENTS, (wanted.dq, wanted.dkv, wanted.dkv)))


def _gradient_of(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def readable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where kernels could not read it: autograd hands over what it has, such
    as one number expanded to a whole tensor."""
    size = tensor.element_size()
    steps = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    if (
        tensor.stride(-1) == 1
        and tensor.data_ptr() % 16 == 0
        and all(n == 1 or stride * size % 16 == 0 for n, stride in steps)
    ):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _run(ready: Ready, given: Tensors, wanted: Wanted) -> Tensor:
    """Fills the gradients among the given tensors, on the current stream; returns that of the
    sink."""
    sink, lse = given["sink"] if wanted.dsink else None, _present(given["lse"])
    if not ready.launches:
        for name in (*ready.gradients, *(["dbias"] if ready.dbias else [])):
            _present(given[name]).zero_()
        if sink is None:
            return lse.new_empty(0)
        # No query sees a key: each LSE is its head's sink.
        dlse = given["dlse"]
        if dlse is None:
            return sink.new_zeros(sink.shape)
        return dlse.sum(1 if dlse.ndim == 2 else (0, 2))
    addresses = {name: 0 if x is None else x.data_ptr() for name, x in given.items()}
    for name, source, offset in ready.sources:
        addresses[name] = addresses[source] + offset
    if any(addresses[name] % 16 for name in "qkv"):
        raise SpecError("q, k and v must start at a multiple of 16 bytes; clone what does not")
    device = _present(given["q"]).device
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    # Freed before the kernels end, and safely so: the allocator hands it out on this stream only.
    workspace = torch.empty(ready.workspace_bytes, dtype=torch.uint8, device=device)
    start = workspace.data_ptr()
    addresses |= {name: start + offset for name, offset in ready.offsets.items()}
    addresses["tile_counter"] = tile_counter(device, stream)
    rows = None if sink is None else _rows_of(ready, workspace)
    if rows is not None and ready.fills_rows:
        rows[0].fill_(math.inf)
        rows[1].zero_()
    for prepared in ready.launches:
        launch(prepared, addresses, stream)
    if sink is None or rows is None:
        return lse.new_empty(0)
    return _sink_gradient(sink, *rows).mul_(ready.d_unit)


def _sink_gradient(sink: Tensor, lse_log2: Tensor, d: Tensor) -> Tensor:
    """-Σ exp(sink - LSE) D over sequences and rows, float32 [h_q], the same bits on every run."""
    return -(torch.exp2(sink[:, None] * LOG2_E - lse_log2) * d).sum((0, 2))


def _rows_of(ready: Ready, workspace: Tensor) -> tuple[Tensor, Tensor]:
    """LSE in log2 units and D in the workspace, float32 of `row_sizes`; after the launches LSE is
    +inf where there is no row or nothing to weigh."""
    size = 4 * math.prod(ready.row_sizes)
    lse_log2, d = (
        workspace[ready.offsets[name] :][:size].view(torch.float32).view(ready.row_sizes)
        for name in ("lse_log2", "d")
    )
    return lse_log2, d


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _make_ready(given: Tensors, arguments: Arguments, wanted: Wanted) -> Ready:
    layout = arguments.layout
    optional = {name: given[name] for name in OPTIONAL}
    q, k, v = unpacked(_present(given["q"]), given["k"], given["v"], layout)
    tensors = {"q": q, "k": k, "v": v, "o": _present(given["o"]), "d_o": _present(given["d_o"])}
    rows = {name: x for name in ("lse", "dlse") if (x := given[name]) is not None}
    extents = extents_of(tensors, layout)
    reasons = violations(tensors, extents, optional, arguments)
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
    if not (scalars.sequences and all(tensor.numel() for tensor in tensors.values())):
        written = tuple(n for n in names_of(wanted) if carriers[n[1]] is not None)
        return Ready((), written, dbias=dbias)
    kernels = _needed(kernels_of(_spec(tensors, optional, arguments), q.device), wanted)
    written = tuple(name for name in _written(kernels) if carriers[name[1]] is not None)
    gradients = unpacked(_present(carriers["q"]), carriers["k"], carriers["v"], layout)
    extents |= extents_of(dict(zip(GRADIENTS, gradients, strict=True)), layout)
    launches = tuple(prepare(each, extents, scalars) for each in kernels)
    sources = sources_of(given, optional, layout)
    sources += tuple(s for s in packed_sources(carriers, layout, "d") if s[1] in written)
    workspaces = lay_out_workspaces(kernels, extents["q"], scalars)
    row_sizes = _row_sizes(kernels, extents["q"], scalars.sequences)
    varies = any(each.kernel.q_seq != "dense" for each in kernels)
    unit = scalars.numbers["keep_scale"]  # D's, with dropout
    return Ready(launches, written, sources, *workspaces, row_sizes, varies, unit, dbias)


def _row_sizes(
    kernels: tuple[LoadedKernel, ...], q: Extent, sequences: int | None
) -> tuple[int, int, int]:
    """Batch, heads and rows of LSE and D in the workspace."""
    entry = next((each.kernel for each in kernels if _family(each) == PREPARES), None)
    known = q.batch if sequences is None else sequences
    rows = entry.row_block * row_blocks(entry, q, known) if entry else 0
    return q.batch, q.heads, rows


PREPARES = "bwd_prepare"  # the family of the kernel that finds LSE and D of every row
# Families of kernels that make gradients of one kind, and nothing that other kernels read.
KIND_OF_FAMILY = {
    **{"sm90_bwd_dq": "dq", "bwd_convert": "dq", "sm90_bwd_dkv": "dkv"},
    "sm90_bwd_dbias": "dbias",
}


def _needed(kernels: tuple[LoadedKernel, ...], wanted: Wanted) -> tuple[LoadedKernel, ...]:
    """All but those that make unwanted gradients alone; none where nothing is wanted. The sink's
    needs no more than LSE and D, the bias's a kernel of its own besides."""
    if not (wanted.dq or wanted.dkv):
        families = {PREPARES: wanted.dsink or wanted.dbias}
        families |= dict.fromkeys(("mask_pack", "sm90_bwd_dbias"), wanted.dbias)
        return tuple(each for each in kernels if families.get(_family(each)))
    unwanted = {kind for kind, want in wanted._asdict().items() if not want}
    kinds = (KIND_OF_FAMILY.get(_family(each)) for each in kernels)
    return tuple(compress(kernels, (kind not in unwanted for kind in kinds)))


def _family(each: LoadedKernel) -> str:
    return each.kernel.entry.partition("__")[0]


def _written(kernels: tuple[LoadedKernel, ...]) -> Iterator[str]:
    """The gradients that kernels write."""
    names = {field.name for each in kernels for field in each.kernel.fields}
    names |= {recipe.tensor for each in kernels for recipe in each.kernel.tensor_maps}
    return (name for name in GRADIENTS if name in names)


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
    tensors: dict[str, Tensor], optional: Mapping[str, Tensor | None], arguments: Arguments
) -> AttentionSpec:
    forward = spec_of(tensors["q"], tensors["k"], tensors["v"], optional, arguments)
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
