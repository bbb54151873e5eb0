"""The operation `attngen::backward`: gradients of dense 16-bit attention, by compiled kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from .. import load
from ..errors import SpecError
from ..launch import Prepared, launch, prepare
from ..load import LoadedKernel
from ..run_time import workspace_bytes
from ..spec import AttentionSpec
from . import mask_bits
from .checks import device_violations, violations
from .operands import extents_of, memory_axes, new_outputs, scalars_of, spec_of
from .operation import format_of, kernels_of, library, remember, tile_counter
from .signature import OPTIONAL, Arguments, Wanted, schema, split, wanted_of

WORKSPACE_ALIGNMENT = 256  # bytes; kernels need 16
GRADIENTS = ("dq", "dk", "dv")
DTYPES = (torch.float16, torch.bfloat16)

library.define(
    "backward(Tensor d_o, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"{schema()}, bool want_dq=True, bool want_dkv=True) -> (Tensor, Tensor, Tensor)"
)


@dataclass(frozen=True, eq=False)
class Ready:
    """What calls of equal shapes, strides and arguments share: the launches, in order, the
    gradients that they write, and where each workspace lies in one allocation of so many bytes. No
    launches: the gradients are zero."""

    launches: tuple[Prepared, ...]
    gradients: tuple[str, ...]
    offsets: dict[str, int]
    workspace_bytes: int
    lengths: tuple[int, int]


_ready: dict[tuple[Any, ...], Ready] = {}


def backward(
    d_o: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, contiguous, in their dtype; [0] where they are not wanted.

    q, k, v and rest as `attngen::forward` took them, o and lse as it returned them, in 16 bits.
    d_o, dlse: gradients of o and of the LSE, None where nothing depends on it. want_dq, want_dkv,
    after the rest: kernels that make unwanted gradients alone are left out.
    Raises: SpecError with every violation; CompileError, LaunchError.
    """
    (optional, arguments), wanted = split(rest), wanted_of(rest)
    tensors = {"q": q, "k": k, "v": v, "o": readable(o), "d_o": readable(d_o)}
    rows = {"lse": lse.contiguous()}
    if dlse is not None:
        rows["dlse"] = dlse.float().contiguous()
    extra = dict(zip(OPTIONAL, optional, strict=True))
    key = (arguments, wanted, *map(format_of, (*tensors.values(), *rows.values(), *optional)))
    ready = remember(_ready, key, lambda: _make_ready(tensors, rows, extra, arguments, wanted))
    with torch.cuda.device(q.device):
        load.ensure_context(q.device.index)
        made = {name: _gradient_of(tensors[name[1]]) for name in ready.gradients}
        given = {name: tensor for name, tensor in extra.items() if tensor is not None}
        if (mask := given.pop("attn_mask", None)) is not None:
            given |= _packed(mask, ready)
        _run(ready, {**tensors, **rows, **given, **made})
    dq, dk, dv = (made[n] if n in names_of(wanted) else q.new_empty(0) for n in GRADIENTS)
    return dq, dk, dv


def _packed(mask: Tensor, ready: Ready) -> dict[str, Tensor]:
    """The mask's bits in the order that each of the kernels reads."""
    names = {field.name for each in ready.launches for field in each.loaded.kernel.fields}
    ways = {"attn_mask": False, "attn_mask_columns": True}
    return {
        name: mask_bits.pack(mask, *ready.lengths, columns=columns)
        for name, columns in ways.items()
        if name in names
    }


def names_of(wanted: Wanted) -> tuple[str, ...]:
    """Those of the gradients."""
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


def _run(ready: Ready, tensors: dict[str, Tensor]) -> None:
    """Fills the gradients among `tensors`, on the current stream."""
    if not ready.launches:
        for name in ready.gradients:
            tensors[name].zero_()
        return
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    if any(addresses[name] % 16 for name in "qkv"):
        raise SpecError("q, k and v must start at a multiple of 16 bytes; clone what does not")
    device = tensors["q"].device
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    # Freed before the kernels end, and safely so: the allocator hands it out on this stream only.
    workspace = torch.empty(ready.workspace_bytes, dtype=torch.uint8, device=device)
    start = workspace.data_ptr()
    addresses |= {name: start + offset for name, offset in ready.offsets.items()}
    addresses["tile_counter"] = tile_counter(device, stream)
    addresses.setdefault("dlse", 0)
    for prepared in ready.launches:
        launch(prepared, addresses, stream)


def _make_ready(
    tensors: dict[str, Tensor],
    rows: dict[str, Tensor],
    optional: Mapping[str, Tensor | None],
    arguments: Arguments,
    wanted: Wanted,
) -> Ready:
    axes = memory_axes(arguments.layout)
    extents = extents_of(tensors, axes)
    reasons = violations(tensors, extents, optional, arguments)
    reasons += device_violations({"q": tensors["q"], **rows})
    if reasons := [*reasons, *_mismatches(tensors, rows, arguments)]:
        raise SpecError(reasons)
    lengths = (extents["q"].seq, extents["k"].seq)
    if not all(tensor.numel() for tensor in tensors.values()):
        return Ready((), names_of(wanted), {}, 0, lengths)
    kernels = _needed(kernels_of(_spec(tensors, optional, arguments), tensors["q"].device), wanted)
    gradients = {name: _gradient_of(tensors[name[1]].to("meta")) for name in _written(kernels)}
    extents |= extents_of(gradients, axes)
    sizes: dict[str, int] = {}
    for each in kernels:
        sizes |= workspace_bytes(each.kernel, extents["q"])
    sizes.pop("tile_counter", None)  # its own, since it must be zero
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-size // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    scalars = scalars_of(tensors["q"], optional, arguments, extents)
    launches = tuple(prepare(each, extents, scalars) for each in kernels)
    return Ready(launches, tuple(gradients), offsets, end, lengths)


# Families of kernels that make gradients of one kind, and nothing that other kernels read.
KIND_OF_FAMILY = {"sm90_bwd_dq": "dq", "bwd_convert": "dq", "sm90_bwd_dkv": "dkv"}


def _needed(kernels: tuple[LoadedKernel, ...], wanted: Wanted) -> tuple[LoadedKernel, ...]:
    """All but those that make unwanted gradients alone; none where nothing is wanted."""
    unwanted = {kind for kind, want in wanted._asdict().items() if not want}
    families = (each.kernel.entry.partition("__")[0] for each in kernels)
    kept = (KIND_OF_FAMILY.get(family) not in unwanted for family in families)
    return tuple(compress(kernels, kept)) if any(wanted) else ()


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
        forward, directions=("bwd",), deterministic=arguments.deterministic
    )


def _fake_backward(
    d_o: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _o, _lse, *rest = others
    names = names_of(wanted_of(rest))
    shapes = (x.shape if name in names else 0 for name, x in zip(GRADIENTS, (q, k, v), strict=True))
    dq, dk, dv = (q.new_empty(shape) for shape in shapes)
    return dq, dk, dv


def _second_derivative(*_: Any) -> None:
    raise SpecError(
        "kernels have no second derivative (a gradient was made with create_graph=True and "
        "differentiated); pass backend='reference'"
    )


library.impl("backward", backward, "CUDA")
torch.library.register_fake("attngen::backward", _fake_backward, lib=library)
torch.library.register_autograd("attngen::backward", _second_derivative, lib=library)
