"""What kernels cannot take: dtypes, scales, strides, sizes, devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ...call import fragment_values
from ...call.bias import sizes_of
from ...call.numbers import Arguments
from ...call.operands import (
    extents_of,
    layout_of,
    sequences_of,
    softmax_scale_of,
    spec_of,
    unpacked,
)
from ...call.table import INPUTS, ROW_OF_OPERAND, SCALES
from ...errors import SpecError
from ...reference.entry_checks import few
from ...reference.fp8 import is_fp8
from ...reference.fp8_checks import (
    CACHE_SCALES,
    dtype_violations,
    output_violations,
    scale_violations,
)
from ...reference.sizes import surely
from ...reference.subclasses import unreadable
from ...reference.type_checks import is_flag
from ...runtime.run_time import Extent
from ...spec.attention_spec import MAX_HEAD_DIM
from ...spec.masks import masks_of
from ...spec.resolve import BIASES
from . import bias, decode, lengths, schedule
from .outputs import output_dtype
from .schedule import Schedule
from .signature import Operands, no_gradient
from .transforms import NO_TANGENTS, may_have_tangents, refuse_tangents

LSE_LIMIT = 2.0**24  # from there on, without a bias, a row has no gradient
SCALE_LIMIT = 2.0**127  # in log2 units it must still be a float32
PAGES, BIAS = map(INPUTS.index, ("page_table_k", "bias"))
OFFSET_LIMIT = 1 << 31  # elements; kernels index scales in 32 bits
TILED = ("bias", "attn_mask")  # but not what they read in tiles


def check_rest(num_splits: object, deterministic: object, schedule: object) -> None:
    """Raises: SpecError where these arguments, which the reference does without, are wrong."""
    decode.check_splits(num_splits)
    if not is_flag(deterministic):
        got = f"got {deterministic!r}"
        raise SpecError(f"deterministic needs True, False or None; {got}. Pass one.")
    if not (schedule is None or isinstance(schedule, Schedule)):
        raise SpecError(f"schedule needs an attngen.Schedule; got {schedule!r}. Make one.")


def refuse_unreadable(operands: Operands) -> None:
    """Raises: SpecError where the storage of an operand does not hold its numbers."""
    if torch.compiler.is_compiling():
        return
    found = [None if x is None else unreadable(x) for x in operands]
    reasons = [f"{name} {why}" for name, why in zip(INPUTS, found, strict=True) if why is not None]
    if reasons:
        raise SpecError(reasons)


def refuse_derivatives(operands: Operands, arguments: Arguments, gradients: bool) -> None:
    """Raises: SpecError where a call needs derivatives that kernels do not have. gradients: whether
    it needs those."""
    if gradients and (reasons := [*_gradient_violations(operands, arguments)]):
        raise SpecError(reasons)
    refuse_tangents(operands)


def traced_refusal(operands: Operands, arguments: Arguments, backend: str) -> SpecError | None:
    """Why a call in code that is being compiled leaves the kernels, where any backend may serve
    it: of what a trace knows, which is not where operands begin."""
    if backend != "auto":
        return None
    reasons = [*number_violations(softmax_scale_of(_q_of(operands), arguments), arguments.softcap)]
    given = [(name, x) for name, x in zip(INPUTS, operands, strict=True) if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for _, x in given):
        reasons += [*_gradient_violations(operands, arguments)]
        refused = [no_gradient(name) for name, x in given if x.requires_grad]
        reasons += [reason for reason in refused if reason is not None]
    if may_have_tangents(operands):
        reasons.append(NO_TANGENTS)
    return SpecError(reasons) if reasons else None


def _q_of(operands: Operands) -> Tensor:
    assert operands[0] is not None  # the operation's schema
    return operands[0]


def _gradient_violations(operands: Operands, arguments: Arguments) -> Iterator[str]:
    """Why kernels have no gradients of a call that needs them."""
    (q, k, v), q = operands[:3], _q_of(operands)
    if is_fp8(q.dtype) or (k is not None and is_fp8(k.dtype)):
        yield (
            "a gradient is needed, but FP8 kernels have no backward yet: call under "
            "torch.no_grad(), or detach what requires it"
        )
    elif output_dtype(q, arguments) != q.dtype:
        yield (
            "a gradient is needed, but kernels have none of a float32 output beside 16-bit "
            "operands: call under torch.no_grad(), or leave out_dtype out"
        )
    if operands[PAGES] is not None:
        yield "pages are inference only; call under torch.no_grad()"
    if any(x is not None and x.shape[-1] > MAX_HEAD_DIM for x in (q, k, v)):
        yield (
            f"a gradient is needed, but head dims above {MAX_HEAD_DIM} have none; call under "
            "torch.no_grad()"
        )
    added = operands[BIAS]
    if added is None or not added.requires_grad:
        return
    *_, columns = sizes_of(added.shape)
    if surely(columns, 1):
        _, k, _ = unpacked(q, k, v, arguments.layout)
        yield from bias.column_violations(added, extents_of({"k": k}, arguments.layout)["k"].seq)


def violations(
    tensors: dict[str, Tensor],
    extents: dict[str, Extent],
    optional: Mapping[str, Tensor | None],
    arguments: Arguments,
    gather: bool = False,
) -> list[str]:
    """Everything about a forward that its kernels cannot take.

    tensors: q, k, v and o as views, of which only o's format counts; extents: theirs; gather: as
    for `operands.spec_of`.
    """
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    reasons = [*dtype_violations(q.dtype, k.dtype, v.dtype)]
    sequences = sequences_of(q, optional, arguments.layout)
    cached, scales = is_fp8(k.dtype), {name: optional[name] for name in SCALES}
    if is_fp8(q.dtype):
        reasons += output_violations(output_dtype(q, arguments), scales["scale_o"])
    else:
        reasons += _misplaced(q, scales, CACHE_SCALES if cached else (), arguments)
    if cached:
        reasons += scale_violations(scales, sequences, extents["k"].heads, (torch.float32,))
    reasons += lengths.violations(q, k, v, optional, arguments, sequences)
    reasons += batch_violations(extents, arguments.layout, sequences)
    reasons += _variant_violations(extents["q"].heads, sequences, optional, arguments)
    heads = extents["q"].heads
    reasons += fragment_values.violations(optional, arguments, sequences, heads)
    reasons += _dropout_violations(optional["rng_state"], arguments.dropout_p)
    reasons += _mask_violations(optional["attn_mask"], sequences, extents, arguments)
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


def stride_violations(tensors: Mapping[str, Tensor], paged: bool) -> Iterator[str]:
    """What is wrong with strides where the copy engine alone reads the operands: FP8, and pages."""
    why = "pages" if paged else "FP8 operands"
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.stride(-1) != 1:
            yield f"{name}: the last axis has stride {tensor.stride(-1)}, needs 1"
        size = tensor.element_size()
        loose = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
        if name != "o" and any(n > 1 and stride * size % 16 for n, stride in loose):
            yield (
                f"{name}: strides {tensor.stride()} of {tensor.dtype}; of {why} all but the last "
                "must be multiples of 16 bytes"
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


def device_violations(tensors: Mapping[str, Tensor | None]) -> list[str]:
    """Those of the tensors that are not where q is."""
    device = next(tensor.device for tensor in tensors.values() if tensor is not None)
    return [
        f"{name} is on {tensor.device}, q on {device}; move one"
        for name, tensor in tensors.items()
        if tensor is not None and tensor.device != device
    ]


def _variant_violations(
    heads: int, sequences: int, optional: Mapping[str, Tensor | None], arguments: Arguments
) -> Iterator[str]:
    """Faults of the tensors of ALiBi and the sink, and strides that reach too far."""
    sink = optional["sink"]
    sizes = {"b": sequences, "h_q": heads}
    for name, tensor in optional.items():
        row = ROW_OF_OPERAND[name]
        if tensor is not None and row.advice and not _is_float32(tensor, *row.shapes_for(sizes)):
            yield f"{name} needs {row.wanted(sizes)}, got {_shape_of(tensor)}"
    if (sink is not None) != (arguments.softmax == "learnable"):
        yield f"sink belongs to softmax='learnable', which needs it; got {arguments.softmax!r}"
    elif sink is not None and not _is_float32(sink, (heads,)):
        yield f"sink needs float32 [h_q={heads}], got {_shape_of(sink)}"
    for name, tensor in optional.items():
        far = tensor is not None and name not in TILED and _last_offset(tensor) >= OFFSET_LIMIT
        if tensor is not None and far:
            yield f"{name}: strides {tensor.stride()} reach beyond 2^31 elements"


def _is_float32(tensor: Tensor, *shapes: tuple[int, ...]) -> bool:
    return tensor.dtype == torch.float32 and tuple(tensor.shape) in shapes


def _shape_of(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _dropout_violations(state: Tensor | None, p: float) -> Iterator[str]:
    if not 0 <= p <= 1:
        yield f"dropout_p={p}: kernels take a probability in 0..1"
    if p > 0 and (
        state is None or (state.dtype, state.shape, state.stride()) != (torch.int64, (2,), (1,))
    ):
        found = None if state is None else f"{state.dtype} {list(state.shape)}"
        yield f"dropout_p={p} needs rng_state, contiguous int64 [2]; got {found}"


def _mask_violations(
    attn_mask: Tensor | None, sequences: int, extents: Mapping[str, Extent], arguments: Arguments
) -> Iterator[str]:
    """Beside packed tokens nobody here knows how far a mask must reach, nor where it ends."""
    if attn_mask is None:
        if masks_of(arguments.mask).arbitrary:
            yield "mask='arbitrary' needs attn_mask, bool, True = take part; got None"
        return
    if found := _misfit(attn_mask, torch.bool, sequences, extents, arguments.layout):
        yield f"attn_mask {found}"


def _bias_violations(
    q: Tensor,
    bias: Tensor | None,
    sequences: int,
    extents: Mapping[str, Extent],
    arguments: Arguments,
) -> Iterator[str]:
    if arguments.bias_type not in BIASES:
        yield f"bias_type={arguments.bias_type!r}: kernels take one of {BIASES}"
    if bias is not None and (found := _misfit(bias, q.dtype, sequences, extents, arguments.layout)):
        yield f"bias {found}"


def _misfit(
    tensor: Tensor, dtype: torch.dtype, sequences: int, extents: Mapping[str, Extent], layout: str
) -> str | None:
    """What a tensor needs that is of another dtype, or no broadcast of [b, h, s_q, s_kv]; of packed
    tokens and of pages it may have any number of positions."""
    parsed = layout_of(layout)
    q, k = extents["q"], extents["k"]
    shape = (*(1,) * (4 - tensor.ndim), *tensor.shape)
    wanted: list[int | str] = [sequences, q.heads, q.seq, k.seq]
    for place, axes in ((2, parsed.q_format), (3, parsed.kv_format)):
        if axes == "thd" or (place == 3 and parsed.paged):
            wanted[place] = f"max_seqlen_{'q' if place == 2 else 'kv'}"
    fits = len(shape) == 4 and all(
        n == 1 or isinstance(need, str) or n == need for n, need in zip(shape, wanted, strict=True)
    )
    if tensor.dtype == dtype and fits:
        return None
    full, name = ", ".join(map(str, wanted)), str(dtype).removeprefix("torch.")
    return f"needs {name}, a broadcast of [{full}]; got {_shape_of(tensor)}"


def _misplaced(
    q: Tensor,
    scales: Mapping[str, Tensor | None],
    fitting: tuple[str, ...],
    arguments: Arguments,
) -> Iterator[str]:
    """What only FP8 calls have, given to others, but for scales that fit them."""
    for name, scale in scales.items():
        if scale is not None and name not in fitting:
            yield f"{name} belongs to FP8 q, k and v; q is {q.dtype}"
    if arguments.amax:
        yield f"the maxima belong to FP8 q, k and v; q is {q.dtype}"
    if output_dtype(q, arguments) not in (q.dtype, torch.float32):
        yield f"out_dtype={arguments.out_dtype}: beside {q.dtype} it is that or torch.float32"


def _last_offset(tensor: Tensor) -> int:
    """Elements from the first to the last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((size - 1) * stride for size, stride in steps)


def check_rows(lse: Tensor) -> None:
    """Refuse rows that kernels of a call without a bias give no gradient; waits for the device.
    lse: [b, h, s] or [h, t], of the forward.

    Raises: SpecError naming the first of them.
    """
    size = lse.abs()
    lost = ((size >= LSE_LIMIT) & (size < float("inf"))).nonzero().tolist()
    if lost:
        raise SpecError(
            few(
                f"lse{place}={lse[tuple(place)].item():g}: rows of a call without a bias have no "
                "gradient from 2^24 on. Scale q or k down."
                for place in lost
            )
        )
