"""Checks of a call: every inconsistency is found before anything is computed.

`check` looks at names, shapes and dtypes only, so it never waits for a device;
`check_values` looks at lengths that are already on the host. Neither cares which device
computes: what a backend cannot do is that backend's own refusal.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..call.fp8_checks import dtype_violations
from ..call.made_mask import is_made
from ..call.position_checks import places_violations, position_violations
from ..call.table import ROWS, AttentionCall, named
from ..call.tensors import dtype_name
from ..errors import SpecError
from ..spec import layouts
from ..spec.layouts import Layout, size
from ..spec.masks import masks_of
from .fp8 import is_fp8
from .fp8_checks import FLOATS, fp8_violations
from .fragment_checks import fragment_violations
from .length_checks import length_violations, value_violations
from .operands import Operands
from .sequences import Span
from .sizes import agree, agree_all, at_least, surely
from .type_checks import SHAPED, TENSORS, type_violations
from .wording import names, shape_of

BIAS_TYPES = ("post_scale", "pre_scale", "alibi")
SOFTMAXES = ("vanilla", "off_by_one", "learnable")


def check(call: AttentionCall) -> Operands:
    """The operands of a call whose arguments agree with each other.

    Raises: SpecError with every violation at once; violations of types or of the layout alone where
    the operands cannot even be told apart.
    """
    if reasons := [*type_violations(named(call))]:
        raise SpecError(reasons)
    operands, reasons = _judge(call)
    if operands is None or reasons:
        raise SpecError([*reasons, *_layout_hints(call)])
    return operands


def _judge(call: AttentionCall) -> tuple[Operands | None, list[str]]:
    """The operands of a call whose arguments have the right types, None where they cannot be told
    apart, and every violation."""
    try:
        operands = find_operands(call)
    except SpecError as error:
        return None, [*error.reasons]
    return operands, [
        *dtype_violations(*map(dtype_name, (operands.q, operands.k, operands.v))),
        *_operand_violations(operands),
        *fp8_violations(call, operands),
        *length_violations(call, operands),
        *fragment_violations(call, operands),
        *_mask_violations(call, operands),
        *position_violations(call, operands.layout.paged),
        *places_violations(call.places, operands.batch),
        *_softmax_violations(call, operands),
        *_bias_violations(call, operands),
        *_alibi_violations(call),
        *_shape_violations(call, operands),
        *_dropout_violations(call, operands),
        *_device_violations(call),
    ]


def _layout_hints(call: AttentionCall) -> Iterator[str]:
    """Other layouts in which nothing would be wrong with a call, as of [b, h, s, d] that is passed
    for [b, s, h, d]."""
    if call.layout not in (*layouts.FORMATS, *layouts.NAMES) or torch.compiler.is_compiling():
        return
    asked = layouts.parse(call.layout)
    fitting: list[tuple[Layout, str]] = []
    for name in (*layouts.FORMATS, *layouts.NAMES):
        layout = layouts.parse(name)
        repeated = layout == asked or any(layout == each for each, _ in fitting)
        if repeated or _judge(AttentionCall(**{**named(call), "layout": name}))[1]:
            continue
        fitting.append((layout, name))
    for layout, name in fitting[:2]:
        axes = ", ".join(layouts.axes_of(layout, "q"))
        yield (
            f"layout={name!r}, with q [{axes}], has nothing against these shapes. Pass it if that "
            "is what they are."
        )


def check_values(
    call: AttentionCall, operands: Operands, queries: list[Span], keys: list[Span]
) -> None:
    """Refuse lengths and pages that do not fit the tensors; waits for the page tables.

    Raises: SpecError with every violation at once.
    """
    reasons = list(value_violations(call, operands, queries, keys))
    if reasons:
        raise SpecError(reasons)


def find_operands(call: AttentionCall) -> Operands:
    """Q, K and V of the call, unpacked, and the number of its sequences.

    Raises: SpecError, where the layout is unknown or the tensors do not have its axes.
    """
    layout = layouts.parse(call.layout)
    q, k, v = layouts.unpack(layout, call.q, call.k, call.v)
    return Operands(layout, q, k, v, batch=_batch(call, layout, q))


def _batch(call: AttentionCall, layout: Layout, q: Tensor) -> int:
    """Number of sequences, from Q's shape or, where tokens are packed, from cu_seqlens."""
    if layout.q_format != "thd":
        return size(q.shape, layout.q_format, "b")
    cu_seqlens = call.lengths("q", layout).cu_seqlens
    if cu_seqlens is None:
        raise SpecError(
            f"layout={layout.name!r} needs cu_seqlens_q int32 [b+1]; got None. "
            f"Pass the cumulative lengths of the sequences."
        )
    return cu_seqlens.numel() - 1 if at_least(cu_seqlens.numel(), 1) else 0


def _operand_violations(operands: Operands) -> Iterator[str]:
    q, k, v = operands.q, operands.k, operands.v
    fmt = operands.layout.kv_format
    if q.shape[-1] != k.shape[-1] or min(q.shape[-1], v.shape[-1]) < 1:
        yield (
            f"q and k need the same head dim, at least 1; got {q.shape[-1]} and "
            f"{k.shape[-1]}, with v's {v.shape[-1]}. Pad the shorter one with zeros."
        )
    h_v = size(v.shape, fmt, "h")
    if h_v != operands.h_kv or operands.h_kv < 1 or operands.h_q % operands.h_kv != 0:
        yield (
            f"k and v need the same number of heads, a divisor of q's; got {operands.h_q} in q, "
            f"{operands.h_kv} in k, {h_v} in v. Repeat heads of k and v until they divide."
        )
    if operands.layout.paged:
        return
    axes = [axis for axis in fmt if axis in "bst"]
    k_sizes, v_sizes = ([size(x.shape, fmt, a) for a in axes] for x in (k, v))
    batch = operands.batch if fmt == "thd" else size(k.shape, fmt, "b")
    if not (agree_all(k_sizes, v_sizes) and agree(batch, operands.batch)):
        yield (
            f"k and v need equal lengths and the batch of q, {operands.batch} sequences; got "
            f"[{', '.join(axes)}] = {k_sizes} in k, {v_sizes} in v. Cut them to fit."
        )


def _mask_violations(call: AttentionCall, operands: Operands) -> Iterator[str]:
    if not _is_window(call.window):
        yield (
            f"window needs (left, right), each an int >= 0, or -1 or None for unbounded; got "
            f"{call.window!r}. A query's own key and the 127 before it are (127, 0)."
        )
    if call.bottom_right not in (None, False, True):
        yield f"bottom_right needs True, False or None; got {call.bottom_right!r}. Pass one."
    if call.bottom_right is False and str(call.mask).endswith("bottom_right"):
        yield (
            f"mask={call.mask!r} aligns to the bottom right; got bottom_right=False. "
            f"Leave bottom_right out, or use mask={call.mask.removesuffix('_bottom_right')!r}."
        )
    arbitrary = isinstance(call.mask, str) and masks_of(call.mask).arbitrary
    if arbitrary and call.attn_mask is None:
        yield "mask='arbitrary' needs attn_mask, bool, True = take part; got None. Pass it."
    # One of bits, which the operations check, and which stands for functions.
    alone = call.backend == "cuda" and call.mask_mod is None and call.block_mask is None
    made = alone and call.attn_mask is not None and is_made(call.attn_mask)
    if call.attn_mask is not None and not made:
        if call.attn_mask.dtype != torch.bool:
            yield (
                f"attn_mask needs bool, True = take part; got {shape_of(call.attn_mask)}. "
                f"Pass scores to be added as bias."
            )
        yield from _broadcast_violations("attn_mask", call.attn_mask, call, operands)
    if call.block_mask is not None:
        heads_fit = call.block_mask.shape[-3] in (1, operands.h_q)
        if not heads_fit or call.block_mask.shape[-4] not in (1, operands.batch):
            yield (
                f"block_mask needs [b, h_q] = [{operands.batch}, {operands.h_q}] or 1; got "
                f"{list(call.block_mask.shape)}. Make it anew, with those or with B=None, H=None."
            )


def _is_window(window: object) -> bool:
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        return False
    return all(
        side is None or (isinstance(side, int) and not isinstance(side, bool) and side >= -1)
        for side in window
    )


def _softmax_violations(call: AttentionCall, operands: Operands) -> Iterator[str]:
    if call.softmax not in SOFTMAXES:
        yield f"softmax={call.softmax!r} is not a softmax. Use one of {', '.join(SOFTMAXES)}."
    elif call.softmax != "learnable" and call.sink is not None:
        yield (
            f"softmax={call.softmax!r} takes no sink; got {shape_of(call.sink)}. "
            f"Use softmax='learnable', or leave sink out."
        )
    elif call.softmax == "learnable" and call.sink is None:
        row = ROWS["sink"]
        yield f"softmax='learnable' needs sink {row.wanted({'h_q': operands.h_q})}; got None. " + (
            row.advice
        )
    # No math.isfinite, of which torch.compile knows nothing where the scale is dynamic.
    if call.softmax_scale is not None and not abs(call.softmax_scale) < float("inf"):
        yield f"softmax_scale needs a finite number; got {call.softmax_scale!r}. Pass one."
    if not call.softcap >= 0:
        yield f"softcap needs a cap > 0, or 0 for none; got {call.softcap!r}. Pass its magnitude."


def _bias_violations(call: AttentionCall, operands: Operands) -> Iterator[str]:
    if call.bias_type not in BIAS_TYPES:
        yield f"bias_type={call.bias_type!r} is not a type. Use one of {', '.join(BIAS_TYPES)}."
    if call.bias is None:
        return
    if call.bias_type == "alibi":
        yield (
            "bias_type='alibi' takes no bias tensor, as it says not where to add one. Pass "
            "alibi_slopes=True with bias_type='post_scale' or 'pre_scale' to have both."
        )
    q = operands.q.dtype
    if call.bias.dtype not in FLOATS:
        advice = "Pass it as attn_mask." if call.bias.dtype == torch.bool else "Cast it."
        wanted = f"16 bits beside {names([q])}" if is_fp8(q) else f"q's dtype, {names([q])}"
        yield f"bias needs {wanted}; got {shape_of(call.bias)}. {advice}"
    yield from _broadcast_violations("bias", call.bias, call, operands)


def _alibi_violations(call: AttentionCall) -> Iterator[str]:
    if call.alibi_slopes is False and call.bias_type == "alibi":
        yield "bias_type='alibi' contradicts alibi_slopes=False. Leave one of them out."


def _shape_violations(call: AttentionCall, operands: Operands) -> Iterator[str]:
    """Tensors of none of the shapes that their rows of the table have."""
    sizes = {"b": operands.batch, "h_q": operands.h_q, "h_kv": operands.h_kv}
    for name, row in ROWS.items():
        tensor = getattr(call, name)
        if not row.advice or tensor is None or isinstance(tensor, bool):
            continue
        if not _is_float(tensor, row.shapes_for(sizes)):
            yield f"{name} needs {row.wanted(sizes)}; got {shape_of(tensor)}. {row.advice}"


def _dropout_violations(call: AttentionCall, operands: Operands) -> Iterator[str]:
    if not 0 <= call.dropout_p <= 1:
        yield f"dropout_p needs a probability in 0..1; got {call.dropout_p!r}. Pass one."
    state = call.rng_state
    if state is not None and (state.dtype != torch.int64 or not agree_all(state.shape, (2,))):
        yield (
            f"rng_state needs int64 [2], (seed, offset); got {shape_of(state)}. "
            f"Pass aux.rng_state of an earlier call, or leave it out to draw one."
        )
    if state is None and call.dropout_p > 0 and operands.layout.paged:
        yield (
            f"dropout_p={call.dropout_p} needs training or an explicit rng_state, and "
            f"layout={operands.layout.name!r} is inference only. Pass rng_state."
        )


def _device_violations(call: AttentionCall) -> Iterator[str]:
    given = {name: getattr(call, name) for name in (*TENSORS, *SHAPED)}
    given |= dict(call.fragment_arguments)
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    if call.block_mask is not None:
        tensors["block_mask"] = call.block_mask.kv_indices
    tables = zip(("page_table (K)", "page_table (V)"), call.page_tables, strict=False)
    for name, tensor in (tensors | dict(tables)).items():
        if tensor.device != call.q.device:
            yield (f"{name} needs q's device, {call.q.device}; got {tensor.device}. Move it there.")


def _is_float(tensor: object, shapes: list[tuple[int, ...]]) -> bool:
    """Whether this is a tensor of 16, 32 or 64-bit floats and of one of the shapes."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in FLOATS:
        return False
    return any(agree_all(tensor.shape, shape) for shape in shapes)


def _broadcast_violations(
    name: str, tensor: Tensor, call: AttentionCall, operands: Operands
) -> Iterator[str]:
    """Whether a tensor broadcasts to [b, h_q, s_q, s_kv].

    Where lengths vary, it must reach at least max_seqlen; a longer one is cut.
    """
    shape = (1,) * (4 - tensor.ndim) + tuple(tensor.shape)
    s_q, s_kv = operands.dense_s_q, operands.dense_s_kv
    fits = len(shape) == 4
    if fits:
        whole = (operands.batch, operands.h_q)
        fits = all(surely(n, 1) or agree(n, m) for n, m in zip(shape[:2], whole, strict=True))
        for have, dense, least in zip(
            shape[2:], (s_q, s_kv), (call.max_seqlen_q, call.max_seqlen_kv), strict=True
        ):
            reaches = at_least(have, least) if dense is None else agree(have, dense)
            fits = fits and (surely(have, 1) or reaches)
    if not fits:
        wanted = f"b={operands.batch}, h_q={operands.h_q}, s_q={s_q or 'max_seqlen_q'}"
        yield (
            f"{name} needs a broadcast of [{wanted}, s_kv={s_kv or 'max_seqlen_kv'}]; got "
            f"{shape_of(tensor)}. Make each axis full or 1."
        )
