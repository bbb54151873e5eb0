"""`fused_attn_fwd`: attention with what its backward needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ... import attention
from ...call.kept import Kept
from ...call.recipe import in_force
from ...call.table import LEARNED
from ...call.taking import fields_of
from ...errors import SpecError
from .arguments import OLDER, taking
from .eight_bits import (
    descales,
    is_stored,
    note,
    read,
    result_dtype,
    stores,
    weights_scales,
    wrapped,
)
from .fused_shared import check, heads_of, lengths_of, stats_of, words_of
from .layouts import parsed, separate, turned
from .variants import BIAS_TYPES, Read, as_sink, said


@dataclass(slots=True)
class ForwardArguments:
    """Arguments of `fused_attn_fwd`, in TransformerEngine's order."""

    is_training: bool
    max_seqlen_q: int
    max_seqlen_kv: int
    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    fake_dtype: torch.dtype
    fused_attention_backend: Any
    attn_bias: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    page_table_k: Tensor | None = None
    page_table_v: Tensor | None = None
    s_quantizer: Any = None
    o_quantizer: Any = None
    attn_scale: float | None = None
    dropout: float = 0.0
    fast_zero_fill: bool = True
    qkv_layout: str = "sbh3d"
    o_format: str = "sbhd"
    qkv_scale_inv_format: str | None = None
    attn_bias_type: str = "no_bias"
    attn_mask_type: str = "padding"
    softmax_type: str = "vanilla"
    window_size: tuple[int, int] = (-1, -1)
    bottom_right_diagonal: bool | None = None
    rng_gen: torch.Generator | None = None
    softmax_offset: Tensor | None = None
    return_max_logit: bool = False
    cuda_graph: bool = False


@dataclass(frozen=True, eq=False)
class ForwardPlan:
    """A call but for its tensors.

    constant: arguments of `attngen.attention`; reads: those that are tensors of the call. axes: Q's
    format. has_bias, has_offset: whether these are among the aux tensors; learned: those of the
    arguments that may have a gradient; in_8_bits: whether q, k and v are FP8 tensors.
    """

    constant: dict[str, Any]
    reads: tuple[Read, ...]
    axes: str
    o_format: str
    has_bias: bool
    has_offset: bool
    in_8_bits: bool
    learned: tuple[str, ...]

    @property
    def reads_carriers_alone(self) -> bool:
        """Whether q, k and v are all tensors that the call reads or draws."""
        others = self.reads or self.has_offset or self.in_8_bits
        return not (others or "dropout_p" in self.constant)


_plans: Kept[ForwardPlan] = Kept()
_FIELDS = fields_of(ForwardArguments, OLDER)
_BY_POSITION = 10  # arguments without defaults
# Arguments by name that are no tensors.
_WORDS = frozenset(
    ("attn_scale", "dropout", "fast_zero_fill", "qkv_layout", "o_format", "attn_bias_type")
    + ("attn_mask_type", "softmax_type", "window_size", "bottom_right_diagonal", "cuda_graph")
)


def _by_form(args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, ...] | None:
    """The result of a call that reads q, k and v alone, and whose arguments, as they are given,
    tell its form; None of others. Raises: as `fused_attn_fwd` does."""
    if len(args) != _BY_POSITION or not _WORDS.issuperset(given) or torch.compiler.is_compiling():
        return None
    training, _, _, ends_q, ends_kv, q, k, v, dtype, backend = args
    of_q, of_k = q.shape, k.shape
    form = (
        *(training, ends_q is None, ends_kv is None, q.dtype, type(q), dtype, backend),
        *(of_q if len(of_q) != 3 else of_q[1:], of_k if len(of_k) != 3 else of_k[1:]),
        *given.items(),
    )
    plan = _plans.find(form, _plan_as_given, args, given)
    learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if learns or in_force.recipe is not None or not plan.reads_carriers_alone:
        return None
    out, results = attention(q, k, v, **plan.constant)
    aux = [stats_of(results.lse, plan.axes), no_state(q.device)]
    return out if plan.o_format == plan.axes else turned(out, plan.axes, plan.o_format), aux


def _plan_as_given(args: tuple[Any, ...], given: dict[str, Any]) -> ForwardPlan:
    """The plan of a call of these arguments. Raises: as `fused_attn_fwd` does."""
    return _plan_of(_FIELDS.filled("fused_attn_fwd", args, given))


@taking(ForwardArguments, quickly=_by_form)
def fused_attn_fwd(call: ForwardArguments) -> tuple[Any, ...]:
    """Attention, with what its backward needs; autograd sees nothing of it.

    q, k, v are three views in the formats of `qkv_layout`, of any strides; a bias has q's dtype and
    any broadcast of [b, h, s_q, s_kv]. Lengths, int32 [b + 1], are read where the layout is packed,
    the mask pads or keys lie in pages. max_seqlen_q and max_seqlen_kv, fast_zero_fill and
    cuda_graph change nothing, nor does fake_dtype but of FP8 tensors: these have the scales of
    s_quantizer and o_quantizer, which learn the maxima; o is in FP8 where o_quantizer's scale is
    known before, else in fake_dtype.

    Returns:
        (o, aux), or (o, aux, max_logit) with return_max_logit. o: in o_format, of packed tokens in
        thd, with V's head dim. aux: [stats, rng_state, (bias), (softmax_offset)]: the log-sum-exp,
        float32 [b, h, s_q, 1] or [t, h, 1]; int64 [2], zeros without dropout; and what the call
        has of the others. max_logit: [h], in o's dtype.

    Raises:
        ValueError: for FusedAttnBackend.No_Backend, a bias that is missing or of another dtype,
            quantizers beside tensors in 16 bits, and whatever `attngen.attention` refuses.
        KeyError: for a word that there is not.
    """
    if torch.compiler.is_compiling():
        plan = _plan_of(call)
    else:
        plan = _plans.find(_form_of(call), _plan_of, call)
    given = plan.constant.copy()
    q, k, v = tensors = (call.q, call.k, call.v)
    for argument, source, make in plan.reads:
        value = getattr(call, source)
        given[argument] = value if make is None else make(value)
    offset = _offset_of(call) if plan.has_offset else None
    if offset is not None:
        given["sink"] = as_sink(offset)
    if call.page_table_k is not None:
        given["page_table"] = (call.page_table_k, call.page_table_v)
    if call.rng_gen is not None and "dropout_p" in given:
        given["rng_state"] = drawn(call.q.device, call.rng_gen)
    if plan.in_8_bits:
        q, k, v = tensors = _stored(call, given)
    learns = torch.is_grad_enabled() and (
        (q.requires_grad or k.requires_grad or v.requires_grad)
        or (plan.learned and any([given[name].requires_grad for name in plan.learned]))
    )
    if learns or in_force.recipe is not None:
        with torch.no_grad():
            out, results = _without_recipe(tensors, given)
    else:
        out, results = attention(*tensors, **given)
    rng_state = results.rng_state
    state = no_state(q.device) if rng_state is None else rng_state
    aux = [stats_of(results.lse, plan.axes), state]
    if plan.has_bias:
        aux.append(call.attn_bias)
    if offset is not None:
        aux.append(offset)
    if plan.o_format != plan.axes:
        out = turned(out, plan.axes, plan.o_format)
    if plan.in_8_bits:
        note(call.s_quantizer, results.amax_s)
        note(call.o_quantizer, results.amax_o)
        out = wrapped(call.o_quantizer, out, call.fake_dtype)
    if call.return_max_logit:
        return out, aux, results.max_logit.to(out.dtype)
    return out, aux


def _stored(call: ForwardArguments, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The FP8 numbers of q, k and v; `given` gets what scales there are."""
    found = read(("q", "k", "v"), (call.q, call.k, call.v))
    given |= descales(found) | weights_scales(call.s_quantizer)
    if stores(call.o_quantizer):
        given["scale_o"] = call.o_quantizer.scale.reshape(1)
    q, k, v = (x.data for x in found.values())
    return q, k, v


def _without_recipe(tensors: tuple[Tensor, Tensor, Tensor], given: dict[str, Any]) -> Any:
    """The call of these tensors as they are, whatever FP8 recipe is in force."""
    recipe, in_force.recipe = in_force.recipe, None
    try:
        return attention(*tensors, **given)
    finally:
        in_force.recipe = recipe


def _form_of(call: ForwardArguments) -> tuple[Any, ...]:
    """A call but for numbers in its tensors, and how many packed tokens there are."""
    q, k, bias, table = call.q, call.k, call.attn_bias, call.page_table_k
    store, of_q, of_k = call.o_quantizer, q.shape, k.shape
    # fmt: off
    return (  # one display: several that are joined take half as long again
        call.is_training, call.fused_attention_backend, call.dropout, call.attn_scale,
        call.qkv_layout, call.o_format, call.window_size, call.bottom_right_diagonal,
        call.attn_bias_type, call.attn_mask_type, call.softmax_type, call.return_max_logit,
        of_q if len(of_q) != 3 else of_q[1:], of_k if len(of_k) != 3 else of_k[1:],
        q.dtype, type(q), call.fake_dtype, call.s_quantizer is None,
        call.cu_seqlens_q is None, call.cu_seqlens_kv is None,
        call.cu_seqlens_q_padded is None, call.cu_seqlens_kv_padded is None,
        None if store is None else (type(store), store.dtype),
        None if bias is None else bias.dtype,
        None if table is None else table.shape,
    )
    # fmt: on


def _plan_of(call: ForwardArguments) -> ForwardPlan:
    """The plan of a call. Raises: as `fused_attn_fwd` does."""
    check(call, call.s_quantizer, call.o_quantizer)
    in_8_bits = is_stored(call.q)
    has_bias, has_offset = call.attn_bias_type in BIAS_TYPES, call.softmax_type != "vanilla"
    if has_bias:
        _check_bias(call.attn_bias, call.q)
    layout = separate(call.qkv_layout)
    dropout = float(call.dropout) if call.is_training else 0.0
    constant = replace(words_of(call, layout), dropout_p=dropout).for_attention()
    constant |= {"return_lse": True, "return_max_logit": call.return_max_logit}
    constant |= {"alibi_slopes": call.attn_bias_type == "alibi" or None}
    if in_8_bits:
        out_dtype = result_dtype(call.o_quantizer, call.fake_dtype)
        constant |= {"return_amax": True, "out_dtype": out_dtype}
    reads = lengths_of(call, layout, call.page_table_k)
    if has_bias:
        reads.append(Read("bias", "attn_bias"))
    axes = parsed(layout).q_format
    o_format = axes if axes == "thd" else call.o_format
    learned = [x.argument for x in reads if x.argument in LEARNED] + ["sink"] * has_offset
    kinds = has_bias, has_offset, in_8_bits
    return ForwardPlan(said(constant), tuple(reads), axes, o_format, *kinds, tuple(learned))


def _offset_of(call: ForwardArguments) -> Tensor | None:
    """The sinks that a call has; zeros of an off-by-one softmax that names none."""
    if call.softmax_type == "vanilla":
        return None
    if call.softmax_offset is not None:
        return call.softmax_offset
    if call.softmax_type == "learnable":
        raise SpecError("softmax_offset is None, and softmax_type='learnable' needs one")
    return call.q.new_zeros((1, heads_of(call), 1, 1), dtype=torch.float32)


def _check_bias(bias: Tensor | None, q: Tensor) -> None:
    if bias is None:
        raise SpecError("attn_bias is None, and attn_bias_type asks for one")
    if bias.dtype != q.dtype:
        raise SpecError(f"attn_bias needs q's dtype, {q.dtype}; got {bias.dtype}")


def drawn(device: torch.device, generator: torch.Generator | None) -> Tensor:
    """A seed and an offset of dropout, int64 [2], of a generator of this device."""
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device, generator=generator)


_no_states: dict[torch.device, Tensor] = {}


def no_state(device: torch.device) -> Tensor:
    """The random state of calls without dropout, which nobody draws from: zeros, made once."""
    if (known := _no_states.get(device)) is not None:
        return known
    with torch.inference_mode(False):
        made = torch.zeros(2, dtype=torch.int64, device=device)
    if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        _no_states[device] = made  # else it is the graph's
    return made
