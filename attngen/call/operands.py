"""Operands of the operations: their sizes and strides, the spec of a call, and what a launch is
told. Tensors are whatever describes itself: no library is known here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from ..runtime.run_time import UNBOUNDED, Extent, Scalars
from ..spec.attention_spec import DTYPES_16BIT, AttentionSpec, dtype_name, is_decode
from ..spec.call_arguments import DESCALES, TOKEN_AXES, scaling_of
from ..spec.layouts import Layout, is_boxed, parse, size, unpack
from ..spec.masks import masks_of
from ..spec.problem import LISTED
from . import bias as bias_of
from . import fragment_values, made_mask, mask_bits
from .dropout import dropout_numbers
from .fragments import LEARNED_SLOT, SLOTS
from .memory import order_in
from .numbers import Arguments
from .positions import Positions
from .table import OPTIONAL, ROW_OF_OPERAND, ROWS
from .tensors import Described, TensorDesc, is_fp8
from .tensors import dtype_name as name_of_dtype

AnyTensor = TypeVar("AnyTensor", bound=Described)


def layout_of(name: str) -> Layout:
    """The layout of that name. Raises: SpecError where there is none."""
    return parse(name)


def unpacked(
    q: AnyTensor, k: AnyTensor | None, v: AnyTensor | None, layout: str
) -> tuple[AnyTensor, AnyTensor, AnyTensor]:
    """Q, K and V of a call as views. Raises: SpecError where they do not fit the layout."""
    return unpack(layout_of(layout), q, k, v)


def output_dtype(q: Described, arguments: Arguments) -> str:
    """The name of the dtype of a call's output."""
    if arguments.out_dtype is not None:
        return arguments.out_dtype
    return "bfloat16" if is_fp8(q) else name_of_dtype(q)


def output_shapes(
    q: Described, v: Described, arguments: Arguments
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the output and of the LSE of a call, whose q and v are views."""
    axes = layout_of(arguments.layout).q_format
    rows = "ht" if axes == "thd" else "bhs"
    return (*q.shape[:-1], v.shape[-1]), tuple([q.shape[axes.index(axis)] for axis in rows])


def outputs_of(q: Described, v: Described, arguments: Arguments) -> tuple[TensorDesc, TensorDesc]:
    """The output and the LSE of a call, whose q and v are views, without gaps."""
    out, lse = output_shapes(q, v, arguments)
    dtype = output_dtype(q, arguments)
    made = TensorDesc.contiguous(out, dtype, q.device)
    if arguments.memory:
        made = TensorDesc.ordered(out, order_in(arguments), dtype, q.device)
    return made, TensorDesc.contiguous(lse, "float32", q.device)


def heads_of(q: Described, arguments: Arguments) -> int:
    """Query heads of a call."""
    return size(q.shape, layout_of(arguments.layout).q_format, "h")


def extent(tensor: Described, axes: str) -> Extent:
    """Sizes and strides of a tensor whose axes are in the order of `axes`; packed tokens are the
    positions of a batch of one."""
    if axes == "thd":
        tokens, heads, dim = tensor.shape
        return Extent(1, tokens, heads, dim, 0, *tensor.stride())
    order = [axes.index(axis) for axis in "bshd"]
    shape, strides = tensor.shape, tensor.stride()
    return Extent(*[shape[axis] for axis in order], *[strides[axis] for axis in order])


def extents_of(tensors: Mapping[str, Described], layout: str) -> dict[str, Extent]:
    """Extents of the tensors of a call, or of its gradients, by their names."""
    parsed = layout_of(layout)
    formats = {name: parsed.kv_format for name in ("k", "v", "dk", "dv")}
    return {name: extent(x, formats.get(name, parsed.q_format)) for name, x in tensors.items()}


def sequences_of(q: Described, optional: Mapping[str, Described | None], layout: str) -> int:
    """How many sequences a call has; -1 where packed tokens come without their lengths."""
    axes = layout_of(layout).q_format
    if axes != "thd":
        return size(q.shape, axes, "b")
    lengths = optional["cu_seqlens_q"]
    return -1 if lengths is None else lengths.numel() - 1


def boxed(tensor: Described) -> bool:
    """Whether the copy engine can read a tensor, wherever it begins at a multiple of 16 bytes."""
    return is_boxed(tensor.shape, tensor.stride(), tensor.element_size())


def spec_of(
    q: Described,
    k: Described,
    v: Described,
    optional: Mapping[str, Described | None],
    arguments: Arguments,
    gather: bool = False,
) -> AttentionSpec:
    """The spec of the forward kernel that serves a call. gather: whether threads copy its operands,
    as they do where strides ask for it, because of addresses."""
    sides = (arguments.window_left, arguments.window_right)
    spec = AttentionSpec(
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        dtype=dtype_name(q.dtype),
        kv_dtype=dtype_name(k.dtype),
        out_dtype=dtype_name(output_dtype(q, arguments)),
        layout=arguments.layout,
        mask=arguments.mask,
        seqused=optional["seqused_q"] is not None or optional["seqused_kv"] is not None,
        window=any(0 <= side < UNBOUNDED for side in sides),
        softcap=arguments.softcap != 0,
        softmax=arguments.softmax,
        return_max_logit=arguments.max_logit,
        bias="none" if optional["bias"] is None else arguments.bias_type,
        dropout=arguments.dropout_p > 0,
        score_mod=arguments.score_mod or False,
        positions=bool(arguments.positions),
        scaling=scaling_of(optional),
    )
    features: dict[str, Any] = {to: optional[name] is not None for name, to in _FEATURES}
    if (mask := optional["attn_mask"]) is not None and made_mask.is_made(mask):
        features |= {"attn_mask": False, "mask_mod": LISTED}
    spec = replace(spec, **features)
    can = spec.dtype in DTYPES_16BIT and not layout_of(arguments.layout).paged
    if can and (gather or not all(map(boxed, (q, k, v)))):
        spec = replace(spec, gather=True)
    sequences = sequences_of(q, optional, arguments.layout)
    decode = is_decode(spec, q.shape, k.shape, arguments.num_splits, sequences)
    return replace(spec, decode=decode)


def softmax_scale_of(q: Described, arguments: Arguments) -> float:
    """The factor of the scores, 1/√d where a call names none."""
    scale = arguments.softmax_scale
    return float(q.shape[-1]) ** -0.5 if scale is None and q.shape[-1] else scale or 0.0


def scalars_of(
    q: Described,
    optional: Mapping[str, Described | None],
    arguments: Arguments,
    extents: Mapping[str, Extent],
) -> Scalars:
    """The run-time values of a call; a window side of −1, or too long to end, is unbounded, but
    for what a causal mask hides anyway."""
    sides = (arguments.window_left, arguments.window_right)
    left, right = (side if 0 <= side < UNBOUNDED else UNBOUNDED for side in sides)
    right = 0 if "causal" in masks_of(arguments.mask).fragments else right
    scale, aligned = softmax_scale_of(q, arguments), arguments.bottom_right
    sequences = sequences_of(q, optional, arguments.layout)
    numbers = {**_stride_numbers(optional), **dropout_numbers(arguments.dropout_p)}
    numbers |= fragment_values.numbers_of(optional, arguments)
    if arguments.softcap:
        numbers |= {"softcap": arguments.softcap, "softcap_inverse": 1 / arguments.softcap}
    for side in ("q", "kv"):  # where only the other side has lengths, all positions are in use
        numbers[f"{side}_least"] = UNBOUNDED if optional[f"seqused_{side}"] is None else 0
    if (mask := optional["attn_mask"]) is not None:
        rows, columns = extents["q"].seq, keys_of(extents, optional)
        if made_mask.is_made(mask):
            numbers |= made_mask.numbers_of(mask, rows, columns)
        else:
            numbers |= mask_bits.numbers_of(mask, rows, columns)
            numbers |= mask_bits.reach_of(mask)
    if (bias := optional["bias"]) is not None:
        numbers |= bias_of.numbers_of(bias)
    if arguments.positions:
        numbers |= Positions.read(arguments.positions).numbers
    return Scalars(scale, left, right, aligned, numbers, sequences)


def keys_of(extents: Mapping[str, Extent], optional: Mapping[str, Described | None]) -> int:
    """Keys that a sequence has room for; of pages in the table that has less."""
    tables = ((name, optional[f"page_table_{name}"]) for name in ("k", "v"))
    rooms = [extents[name].seq * (1 if x is None else x.shape[1]) for name, x in tables]
    return min(rooms)


Source = tuple[str, str, int]  # a parameter, the tensor of the call that it points into, bytes


def packed_sources(
    carriers: Mapping[str, Described | None], layout: str, prefix: str = ""
) -> tuple[Source, ...]:
    """Where packed operands lie; with the prefix `d` their gradients, the carriers being those."""
    parsed = layout_of(layout)
    found = []
    for name in parsed.packed_operands:
        carrier, axis, place = parsed.home(name)
        tensor = carriers[carrier]
        assert tensor is not None  # `unpack` has seen it
        offset = place * tensor.stride()[axis] * tensor.element_size()
        found.append((prefix + name, prefix + carrier, offset))
    return tuple(found)


def sources_of(
    carriers: Mapping[str, Described | None],
    optional: Mapping[str, Described | None],
    arguments: Arguments,
) -> tuple[Source, ...]:
    """Addresses of parts of the call's tensors: packed operands, and the lengths and operands of
    fragments by the names under which kernels know them; those that are absent are left out."""
    parsed = layout_of(arguments.layout)
    found = [*packed_sources(carriers, arguments.layout)]
    found += fragment_values.sources_of(optional, arguments)
    for side, other, axes in (("q", "kv", parsed.q_format), ("kv", "q", parsed.kv_format)):
        offsets = (f"cu_seqlens_{side}_padded", f"cu_seqlens_{side}")
        wanted: dict[str, tuple[str, ...]] = {
            f"{side}_lengths": (f"seqused_{side}", f"seqused_{other}")
        }
        if axes == "thd":
            wanted = {f"{side}_seqlens": offsets[1:], f"{side}_offsets": offsets}
        for parameter, names in wanted.items():
            given = [name for name in names if optional[name] is not None]
            found += [(parameter, name, 0) for name in given[:1]]
    tables = {"k_page_table": "page_table_k", "v_page_table": "page_table_v"}
    found += [(field, name, 0) for field, name in tables.items() if optional[name] is not None]
    return tuple(found)


_FEATURES = tuple((row.name, row.feature) for row in ROWS.values() if row.feature and row.operands)
_BY_HEAD = tuple(
    name
    for name in OPTIONAL
    if ROW_OF_OPERAND[name].has_heads and name not in (*SLOTS, LEARNED_SLOT)
)


def _stride_numbers(optional: Mapping[str, Described | None]) -> dict[str, int | float]:
    numbers: dict[str, int | float] = {}
    for name in DESCALES:
        if (x := optional[name]) is not None and len(x.shape) == TOKEN_AXES:
            numbers[f"{name}_stride_row"] = x.stride()[-1]
    for name in _BY_HEAD:
        strides = zip(("batch", "head"), head_strides(optional[name]), strict=True)
        numbers |= {f"{name}_stride_{axis}": stride for axis, stride in strides}
    return numbers


def head_strides(tensor: Described | None) -> tuple[int, int]:
    """Elements from one sequence to the next and from one head to the next, of a tensor [h],
    [b, h] or [b, h, s]; 0 over a single one."""
    if tensor is None:
        return 0, 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    strides = [stride if size > 1 else 0 for size, stride in steps]
    batch, head = strides[:2] if len(strides) > 1 else (0, *strides)
    return batch, head
