"""The operation `attngen::forward`: dense 16-bit attention through compiled kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import counters, load
from ..builder import build as build_spec
from ..errors import SpecError
from ..launch import UNBOUNDED, Extent, Prepared, Scalars, launch, prepare
from ..layouts import parse
from ..spec import AttentionSpec, dtype_name

SCALE_LIMIT = 2.0**127  # in log2 units it must still be a float32
ARCH_OF_CAPABILITY = {(9, 0): "sm_90a"}

_library = torch.library.Library("attngen", "DEF")
_library.define(
    "forward(Tensor q, Tensor k, Tensor v, str layout, str mask, float softmax_scale, "
    "int window_left, int window_right, bool bottom_right, bool partial) -> (Tensor, Tensor)"
)


@dataclass(frozen=True)
class Variant:
    """What selects a kernel of `forward`: compile-time facts of the call, and the device."""

    dtype: str
    head_dim: int
    head_dim_v: int
    mask: str
    window: bool
    partial: bool
    device: int


def device_arch(device: torch.device) -> str | None:
    """The architecture whose kernels run on this device; None where there are none."""
    if device.type != "cuda":
        return None
    return ARCH_OF_CAPABILITY.get(torch.cuda.get_device_capability(device))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: str,
    mask: str,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    bottom_right: bool,
    partial: bool,
) -> tuple[Tensor, Tensor]:
    """Attention of dense tensors: output and log-sum-exp.

    q [b, s_q, h_q, d], k [b, s_kv, h_kv, d], v [b, s_kv, h_kv, d_v] in the axis order of
    `layout` (`bshd`, `sbhd` or `bhsd`), float16 or bfloat16, one CUDA device, last axis
    contiguous, other strides and addresses multiples of 16 bytes. Window sides in keys, −1
    unbounded. Returns the output in Q's axis order and dtype (float32 where `partial`), and the
    LSE, natural log, float32 [b, h_q, s_q].
    Raises: SpecError with every violation; LaunchError.
    """
    out, lse = _outputs(q, v, layout, partial)
    key = (
        *(q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()),
        *(q.dtype, k.dtype, v.dtype, q.device, k.device, v.device),
        *(layout, mask, softmax_scale, window_left, window_right, bottom_right, partial),
    )
    prepared = _prepared.get(key)
    if prepared is None:
        left, right = (
            side if 0 <= side < UNBOUNDED else UNBOUNDED for side in (window_left, window_right)
        )
        scalars = Scalars(softmax_scale, left, right, bottom_right)
        prepared = _prepare(q, k, v, out, layout, mask, scalars, partial)
        if len(_prepared) >= _PREPARED_LIMIT:
            _prepared.clear()
        _prepared[key] = prepared
    if isinstance(prepared, Prepared):
        addresses = {
            "q": q.data_ptr(),
            "k": k.data_ptr(),
            "v": v.data_ptr(),
            "o": out.data_ptr(),
            "lse": lse.data_ptr(),
        }
        if any(addresses[name] % 16 for name in ("q", "k", "v")):
            raise SpecError("q, k and v must start at a multiple of 16 bytes; clone what does not")
        with torch.cuda.device(q.device):
            load.ensure_context(q.device.index)
            stream = torch._C._cuda_getCurrentRawStream(q.device.index)
            if prepared.loaded.kernel.workspace:
                addresses["tile_counter"] = _tile_counter(q.device, stream)
            launch(prepared, addresses, stream)
    else:  # no query, or no key that one could see
        out.zero_()
        lse.fill_(-math.inf)
    return out, lse


class _NothingToCompute:
    """Stands for shapes in which no query sees a key, so that nothing is launched."""


_PREPARED_LIMIT = 4096
_prepared: dict[tuple[object, ...], Prepared | _NothingToCompute] = {}
_kernels: dict[Variant, load.LoadedKernel] = {}


def _outputs(q: Tensor, v: Tensor, layout: str, partial: bool) -> tuple[Tensor, Tensor]:
    axes = memory_axes(layout)
    batch, seq, heads = (q.shape[axes.index(axis)] for axis in "bsh")
    dtype = torch.float32 if partial else q.dtype
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)
    return out, q.new_empty((batch, heads, seq), dtype=torch.float32)


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    layout: str,
    mask: str,
    scalars: Scalars,
    partial: bool,
) -> Prepared | _NothingToCompute:
    axes = memory_axes(layout)
    tensors = {"q": q, "k": k, "v": v, "o": out}
    extents = {name: extent(tensor, axes) for name, tensor in tensors.items()}
    if reasons := violations(tensors, extents, scalars):
        raise SpecError(reasons)
    if q.numel() == 0 or k.numel() == 0 or out.numel() == 0:
        return _NothingToCompute()
    variant = Variant(
        dtype=dtype_name(q.dtype),
        head_dim=extents["q"].dim,
        head_dim_v=extents["v"].dim,
        mask=mask,
        window=min(scalars.window_left, scalars.window_right) < UNBOUNDED,
        partial=partial,
        device=q.device.index,
    )
    return prepare(_kernel(variant, q.device), extents, scalars)


def _kernel(variant: Variant, device: torch.device) -> load.LoadedKernel:
    if variant not in _kernels:
        arch = device_arch(device)
        if arch is None:
            raise SpecError(f"no kernels for {device}; available: {[*ARCH_OF_CAPABILITY.values()]}")
        spec = AttentionSpec(
            head_dim=variant.head_dim,
            head_dim_v=variant.head_dim_v,
            dtype=variant.dtype,
            out_dtype="fp32" if variant.partial else None,
            mask=variant.mask,
            window=variant.window,
        )
        (built,) = build_spec(spec, arch)
        with torch.cuda.device(device):
            _kernels[variant] = load.load(built.binary, built.cubin, variant.device)
    return _kernels[variant]


def memory_axes(layout: str) -> str:
    """Order of the axes b, s, h, d of all operands. Raises: SpecError for any other layout."""
    parsed = parse(layout)
    if not parsed.dense:
        raise SpecError(f"layout={layout!r} has no kernels; available: bshd, sbhd, bhsd")
    return parsed.q_format


def extent(tensor: Tensor, axes: str) -> Extent:
    """Sizes and strides of a tensor whose axes are in the order of `axes`."""
    order = [axes.index(axis) for axis in "bshd"]
    sizes = (tensor.shape[axis] for axis in order)
    strides = (tensor.stride(axis) for axis in order[:3])
    return Extent(*sizes, *strides)


def violations(
    tensors: dict[str, Tensor], extents: dict[str, Extent], scalars: Scalars
) -> list[str]:
    """Everything about the operands that the kernels cannot take."""
    q, k, v = extents["q"], extents["k"], extents["v"]
    reasons: list[str] = []
    for name, tensor in tensors.items():
        if tensor.device != tensors["q"].device:
            reasons.append(f"{name} is on {tensor.device}, q on {tensors['q'].device}; move one")
        if name != "o" and tensor.dtype != tensors["q"].dtype:
            reasons.append(f"{name} is {tensor.dtype}, q {tensors['q'].dtype}; they must be equal")
        if tensor.numel() and tensor.stride(-1) != 1:
            reasons.append(f"{name}: the last axis has stride {tensor.stride(-1)}, needs 1")
        size = tensor.element_size()
        loose = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
        if name != "o" and any(n > 1 and stride * size % 16 for n, stride in loose):
            reasons.append(
                f"{name}: strides {tensor.stride()} of {tensor.dtype}; all but the last must be "
                "multiples of 16 bytes"
            )
    if (k.batch, k.seq, k.heads) != (v.batch, v.seq, v.heads) or q.batch != k.batch:
        reasons.append(
            f"batch, length and heads do not agree: q {q[:3]}, k {k[:3]}, v {v[:3]} "
            "(batch, length, heads)"
        )
    if q.dim != k.dim:
        reasons.append(f"head dims of q and k differ: {q.dim} and {k.dim}")
    if q.heads and (not k.heads or q.heads % k.heads):
        reasons.append(f"{q.heads} query heads are not a multiple of {k.heads} key/value heads")
    if not (0 < scalars.softmax_scale < SCALE_LIMIT):
        reasons.append(
            f"softmax_scale={scalars.softmax_scale}: kernels take a positive float32 number"
        )
    return reasons


def _tile_counter(device: torch.device, stream: int) -> int:
    """Address of one zeroed int32 that no concurrent launch shares.

    Launches on one stream follow each other and leave it at zero, so a stream keeps its own. A
    captured launch may be replayed on any stream, so it gets one that lives in the graph.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device).data_ptr()
    return counters.address(device.index, stream)


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: str,
    mask: str,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    bottom_right: bool,
    partial: bool,
) -> tuple[Tensor, Tensor]:
    return _outputs(q, v, layout, partial)


_library.impl("forward", forward, "CUDA")
torch.library.register_fake("attngen::forward", _fake_forward, lib=_library)
