"""The operation `attngen::backward`: gradients of dense 16-bit attention, by compiled kernels.

Nothing differentiable calls it yet.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import features, load, resolve
from ..builder import build_problem
from ..errors import SpecError
from ..launch import Prepared, launch, prepare
from ..problem import Problem
from ..reference.fp8_checks import dtype_violations
from ..run_time import UNBOUNDED, Scalars, workspace_bytes
from ..spec import AttentionSpec, dtype_name
from .operands import device_violations, extent, memory_axes, outputs, scalars_of, violations
from .operation import device_arch, format_of, library, tile_counter

WORKSPACE_ALIGNMENT = 256  # bytes; kernels need 16
GRADIENTS = ("dq", "dk", "dv")

library.define(
    "backward(Tensor d_o, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    "str layout, str mask, float softmax_scale, int window_left, int window_right, "
    "bool bottom_right, bool deterministic) -> (Tensor, Tensor, Tensor)"
)


@dataclass(frozen=True, eq=False)
class Ready:
    """What calls of equal shapes, strides and arguments share: the launches, in order, and where
    each workspace lies in one allocation of so many bytes. No launches: the gradients are zero."""

    launches: tuple[Prepared, ...]
    offsets: dict[str, int]
    workspace_bytes: int


_LIMIT = 4096
_ready: dict[tuple[Any, ...], Ready] = {}
_kernels: dict[tuple[Problem, int], tuple[load.LoadedKernel, ...]] = {}


def backward(
    d_o: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    layout: str,
    mask: str,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    bottom_right: bool,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, contiguous, in their dtype.

    q, k, v and the other arguments as `attngen::forward` took them, o and lse as it returned them
    (not partial). d_o, dlse: gradients of o and of the LSE, None where nothing depends on it.
    `deterministic`: the same bits on every run, at the cost of some speed.
    Raises: SpecError with every violation; CompileError, LaunchError.
    """
    tensors = {"q": q, "k": k, "v": v, "o": readable(o), "d_o": readable(d_o)}
    tensors |= {name: torch.empty_like(tensors[name[1]], memory_format=torch.contiguous_format)
                for name in GRADIENTS}  # fmt: skip
    rows = {"lse": lse.contiguous()}
    if dlse is not None:
        rows["dlse"] = dlse.float().contiguous()
    arguments = (
        *(layout, mask, softmax_scale, window_left, window_right),
        *(bottom_right, deterministic),
    )
    key = (arguments, *map(format_of, (*tensors.values(), *rows.values())))
    if key not in _ready:
        if len(_ready) >= _LIMIT:
            _ready.clear()
        _ready[key] = _make_ready(tensors, rows, arguments)
    with torch.cuda.device(q.device):
        load.ensure_context(q.device.index)
        _run(_ready[key], {**tensors, **rows})
    return tensors["dq"], tensors["dk"], tensors["dv"]


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
        for name in GRADIENTS:
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
    tensors: dict[str, Tensor], rows: dict[str, Tensor], arguments: tuple[Any, ...]
) -> Ready:
    layout, mask, *numbers, deterministic = arguments
    axes, scalars = memory_axes(layout), scalars_of(*numbers)
    extents = {name: extent(tensor, axes) for name, tensor in tensors.items()}
    reasons = violations(tensors, extents, scalars)
    reasons += device_violations({"q": tensors["q"], **rows})
    if reasons := [*reasons, *_mismatches(tensors, rows, layout)]:
        raise SpecError(reasons)
    if not all(tensor.numel() for tensor in tensors.values()):
        return Ready((), {}, 0)
    problem = _problem(tensors, mask, scalars, deterministic)
    kernels = _load(problem, tensors["q"].device)
    sizes: dict[str, int] = {}
    for each in kernels:
        sizes |= workspace_bytes(each.kernel, extents["q"])
    del sizes["tile_counter"]  # its own, since it must be zero
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-size // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    return Ready(tuple(prepare(each, extents, scalars) for each in kernels), offsets, end)


def _mismatches(tensors: dict[str, Tensor], rows: dict[str, Tensor], layout: str) -> list[str]:
    """What does not fit q, k and v, whose own dtypes must agree too."""
    q, v = tensors["q"], tensors["v"]
    reasons = [*dtype_violations(q.dtype, tensors["k"].dtype, v.dtype)]
    if q.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"q is {q.dtype}; attngen::backward takes float16 and bfloat16")
    out, lse = outputs(q.to("meta"), v.to("meta"), layout, q.dtype)
    expected = {"o": out, "d_o": out, **dict.fromkeys(rows, lse)}
    found = {**tensors, **rows}
    return reasons + [
        f"{name} needs {like.dtype} {list(like.shape)}, got {x.dtype} {list(x.shape)}"
        for name, like in expected.items()
        if ((x := found[name]).dtype, x.shape) != (like.dtype, like.shape)
    ]


def _problem(
    tensors: dict[str, Tensor], mask: str, scalars: Scalars, deterministic: bool
) -> Problem:
    spec = AttentionSpec(
        head_dim=tensors["q"].shape[-1],
        head_dim_v=tensors["v"].shape[-1],
        dtype=dtype_name(tensors["q"].dtype),
        mask=mask,
        window=min(scalars.window_left, scalars.window_right) < UNBOUNDED,
    )
    (forward,) = resolve.resolve(spec, features.scan())
    return dataclasses.replace(forward, direction="bwd", deterministic=deterministic)


def _load(problem: Problem, device: torch.device) -> tuple[load.LoadedKernel, ...]:
    """The problem's kernels on this device, in the order of launch, built and loaded once."""
    key = (problem, device.index)
    if key not in _kernels:
        arch = device_arch(device)
        if arch is None:
            raise SpecError(f"no kernels for {device}")
        with torch.cuda.device(device):
            _kernels[key] = tuple(
                load.load(built.binary, built.cubin, device.index)
                for built in build_problem(problem, arch)
            )
    return _kernels[key]


def _fake_backward(
    d_o: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv


library.impl("backward", backward, "CUDA")
torch.library.register_fake("attngen::backward", _fake_backward, lib=library)
