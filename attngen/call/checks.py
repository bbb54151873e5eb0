"""Faults of a call that its kernels cannot take: dtypes, scales, strides, sizes, devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..fragments.program import MASK_PREFIX
from ..runtime.run_time import Extent
from ..spec.masks import masks_of
from ..spec.resolve import BIASES
from . import decode, fragment_values, length_checks, made_mask, schedule
from .bias import sizes_of
from .fp8_checks import (
    BIAS_DTYPE,
    CACHE_SCALES,
    ScaledSizes,
    TokenAxis,
    dtype_violations,
    output_violations,
    scale_violations,
)
from .numbers import Arguments
from .operands import keys_of, layout_of, output_dtype, sequences_of, softmax_scale_of, spec_of
from .table import ROW_OF_OPERAND, SCALES
from .tensors import Described, dtype_name, is_fp8, named

SCALE_LIMIT = 2.0**127  # in log2 units it must still be a float32
OFFSET_LIMIT = 1 << 31  # elements; kernels index scales in 32 bits
TILED = ("bias", "attn_mask")  # but not what they read in tiles
Tensors = Mapping[str, "Described | None"]


def violations(
    tensors: Mapping[str, Described],
    extents: dict[str, Extent],
    optional: Tensors,
    arguments: Arguments,
    gather: bool = False,
) -> list[str]:
    """Everything about a forward that its kernels cannot take.

    tensors: q, k, v and o as views, of which only o's format counts; extents: theirs; gather: as
    for `operands.spec_of`.
    """
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    reasons = [*dtype_violations(dtype_name(q), dtype_name(k), dtype_name(v))]
    sequences, heads = sequences_of(q, optional, arguments.layout), extents["q"].heads
    cached, scales = is_fp8(k), {name: optional[name] for name in SCALES}
    if is_fp8(q):
        reasons += output_violations(output_dtype(q, arguments), scales["scale_o"] is not None)
    else:
        reasons += _misplaced(q, scales, CACHE_SCALES if cached else (), arguments)
    if cached:
        sizes = _scaled_sizes(q, extents, arguments.layout, sequences)
        reasons += scale_violations(scales, sizes, ("float32",))
    reasons += length_checks.violations(tensors, optional, arguments, sequences)
    reasons += batch_violations(extents, arguments.layout, sequences)
    reasons += _variant_violations(heads, sequences, optional, arguments)
    reasons += fragment_values.violations(optional, arguments, sequences, heads)
    reasons += _dropout_violations(optional["rng_state"], arguments.dropout_p)
    reasons += _mask_violations(sequences, extents, optional, arguments, backward="d_o" in tensors)
    reasons += _bias_violations(q, optional["bias"], sequences, extents, arguments)
    reasons += schedule.violations(optional["schedule"], sequences)
    spec = spec_of(q, k, v, optional, arguments, gather)
    reasons += decode.violations(extents, optional, arguments, spec.decode)
    reasons += device_violations({**tensors, **optional})
    paged = layout_of(arguments.layout).paged
    if not spec.gathers:
        reasons += stride_violations(tensors, paged)
    reasons += operand_violations(extents, paged)
    return reasons + [*number_violations(softmax_scale_of(q, arguments), arguments.softcap)]


def _scaled_sizes(
    queries: Described, extents: Mapping[str, Extent], layout: str, sequences: int
) -> ScaledSizes:
    """Sizes that scales may have: of tokens beside FP8 queries alone."""
    q, k, parsed = extents["q"], extents["k"], layout_of(layout)
    made = ScaledSizes(sequences, k.heads, q.heads)
    if not is_fp8(queries) or parsed.paged:
        return made
    of_q = TokenAxis(q.batch, q.seq, parsed.q_format == "thd")
    return made._replace(of_q=of_q, of_kv=TokenAxis(k.batch, k.seq, parsed.kv_format == "thd"))


def number_violations(softmax_scale: float, softcap: float) -> Iterator[str]:
    """Faults of the scale and the softcap."""
    if not (0 < softmax_scale < SCALE_LIMIT):
        yield f"softmax_scale={softmax_scale}: kernels take a positive float32 number"
    if not (softcap == 0 or 1 / SCALE_LIMIT < softcap < SCALE_LIMIT):
        yield f"softcap={softcap}: kernels take a positive float32 number, 0 for none"


def batch_violations(extents: dict[str, Extent], layout: str, sequences: int) -> Iterator[str]:
    """Whether q and k have as many sequences; of packed tokens the lengths say how many."""
    batch = extents["k"].batch
    parsed = layout_of(layout)
    if parsed.kv_format != "thd" and not parsed.paged and sequences not in (-1, batch):
        yield f"batch: q has {sequences} sequences, k has {batch}"


def stride_violations(tensors: Mapping[str, Described], paged: bool) -> Iterator[str]:
    """Faults of strides where the copy engine alone reads the operands: FP8, and pages."""
    why = "pages" if paged else "FP8 operands"
    for name, tensor in tensors.items():
        *strides, last = tensor.stride()
        if tensor.numel() and last != 1:
            yield f"{name}: the last axis has stride {last}, needs 1"
        size = tensor.element_size()
        loose = zip(tensor.shape[:-1], strides, strict=True)
        if name != "o" and any(n > 1 and stride * size % 16 for n, stride in loose):
            yield (
                f"{name}: strides {(*strides, last)} of {dtype_name(tensor)}; of {why} all but the "
                "last must be multiples of 16 bytes"
            )


def operand_violations(extents: dict[str, Extent], paged: bool) -> Iterator[str]:
    """Faults of sizes, whatever the dtypes."""
    q, k, v = extents["q"], extents["k"], extents["v"]
    if k.heads != v.heads or (not paged and (k.batch, k.seq) != (v.batch, v.seq)):
        yield (
            f"batch, length and heads do not agree: q {q[:3]}, k {k[:3]}, v {v[:3]} "
            "(batch, length, heads)"
        )
    if q.dim != k.dim:
        yield f"head dims of q and k differ: {q.dim} and {k.dim}"
    if q.heads and (not k.heads or q.heads % k.heads):
        yield f"{q.heads} query heads are not a multiple of {k.heads} key/value heads"


def device_violations(tensors: Tensors) -> list[str]:
    """Tensors that are not where q, the first of them, is."""
    device = next(tensor.device for tensor in tensors.values() if tensor is not None)
    return [
        f"{name} is on {tensor.device}, q on {device}; move one"
        for name, tensor in tensors.items()
        if tensor is not None and tensor.device != device
    ]


def _variant_violations(
    heads: int, sequences: int, optional: Tensors, arguments: Arguments
) -> Iterator[str]:
    """Tensors of none of the shapes of their rows, a sink without its softmax, and strides that
    reach too far."""
    sink = optional["sink"]
    sizes = {"b": sequences, "h_q": heads}
    for name, tensor in optional.items():
        row = ROW_OF_OPERAND[name]
        if tensor is not None and row.advice and not _is_float32(tensor, *row.shapes_for(sizes)):
            yield f"{name} needs {row.wanted(sizes)}, got {named(tensor)}"
    if sink is not None and arguments.softmax != "learnable":
        yield f"sink belongs to softmax='learnable'; got {arguments.softmax!r}"
    if sink is None and arguments.softmax == "learnable":
        yield "softmax='learnable' needs sink float32 [h_q]; got None. Pass one score a head."
    for name, tensor in optional.items():
        far = tensor is not None and name not in TILED and _last_offset(tensor) >= OFFSET_LIMIT
        if tensor is not None and far:
            yield f"{name}: strides {tensor.stride()} reach beyond 2^31 elements"


def _is_float32(tensor: Described, *shapes: tuple[int, ...]) -> bool:
    return dtype_name(tensor) == "float32" and tuple(tensor.shape) in shapes


def _dropout_violations(state: Described | None, p: float) -> Iterator[str]:
    if not 0 <= p <= 1:
        yield f"dropout_p={p}: kernels take a probability in 0..1"
    if p > 0 and (state is None or not _is_rng_state(state)):
        found = None if state is None else named(state)
        yield f"dropout_p={p} needs rng_state, contiguous int64 [2]; got {found}"


def _is_rng_state(state: Described) -> bool:
    return (dtype_name(state), tuple(state.shape), tuple(state.stride())) == ("int64", (2,), (1,))


def _mask_violations(
    sequences: int,
    extents: Mapping[str, Extent],
    optional: Mapping[str, Described | None],
    arguments: Arguments,
    *,
    backward: bool,
) -> Iterator[str]:
    """Beside packed tokens nobody here knows how far a mask must reach, nor where it ends."""
    attn_mask = optional["attn_mask"]
    if attn_mask is None:
        if masks_of(arguments.mask).arbitrary:
            yield "mask='arbitrary' needs attn_mask, bool, True = take part; got None"
        return
    if made_mask.is_made(attn_mask):
        sizes = sequences, extents["q"].heads, extents["q"].seq, keys_of(extents, optional)
        yield from made_mask.violations(attn_mask, *sizes, backward=backward)
        words = masks_of(arguments.mask).fragments
        if made_mask.is_asked(attn_mask) != any(x.startswith(MASK_PREFIX) for x in words):
            yield f"mask={arguments.mask!r} is of another attn_mask that attngen made"
    elif found := _misfit(attn_mask, "bool", sequences, extents, arguments.layout):
        yield f"attn_mask {found}"


def _bias_violations(
    q: Described,
    bias: Described | None,
    sequences: int,
    extents: Mapping[str, Extent],
    arguments: Arguments,
) -> Iterator[str]:
    if arguments.bias_type not in BIASES:
        yield f"bias_type={arguments.bias_type!r}: kernels take one of {BIASES}"
    if bias is None:
        return
    dtype = BIAS_DTYPE if is_fp8(q) else dtype_name(q)
    if found := _misfit(bias, dtype, sequences, extents, arguments.layout):
        yield f"bias {found}"


def _misfit(
    tensor: Described, dtype: str, sequences: int, extents: Mapping[str, Extent], layout: str
) -> str | None:
    """Say what a tensor needs that is of another dtype, or no broadcast of [b, h, s_q, s_kv]; of
    packed tokens and of pages it may have any number of positions."""
    parsed = layout_of(layout)
    q, k = extents["q"], extents["k"]
    shape = sizes_of(tensor.shape)
    wanted: list[int | str] = [sequences, q.heads, q.seq, k.seq]
    for place, axes in ((2, parsed.q_format), (3, parsed.kv_format)):
        if axes == "thd" or (place == 3 and parsed.paged):
            wanted[place] = f"max_seqlen_{'q' if place == 2 else 'kv'}"
    fits = len(shape) == 4 and all(
        n == 1 or isinstance(need, str) or n == need for n, need in zip(shape, wanted, strict=True)
    )
    if dtype_name(tensor) == dtype and fits:
        return None
    return f"needs {dtype}, a broadcast of [{', '.join(map(str, wanted))}]; got {named(tensor)}"


def _misplaced(
    q: Described, scales: Tensors, fitting: tuple[str, ...], arguments: Arguments
) -> Iterator[str]:
    """Arguments of FP8 calls alone, given to others, but for scales that fit them."""
    dtype = dtype_name(q)
    for name, scale in scales.items():
        if scale is not None and name not in fitting:
            yield f"{name} belongs to FP8 q, k and v; q is {dtype}"
    if arguments.amax:
        yield f"the maxima belong to FP8 q, k and v; q is {dtype}"
    if output_dtype(q, arguments) not in (dtype, "float32"):
        yield f"out_dtype={arguments.out_dtype}: beside {dtype} it is that or float32"


def _last_offset(tensor: Described) -> int:
    """Elements from the first to the last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return sum([(size - 1) * stride for size, stride in steps])
