"""`fused_attn` of TransformerEngine's JAX package, computed by attngen."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...call import routing
from ...call.context.order import AnyOrder
from ...call.table import ROWS, AttentionCall, make_call
from ...call.taking import taking
from ...call.tensors import TensorDesc
from ...errors import SpecError
from .attention import attend
from .context_parallel import Spread, attend_spread
from .names import AttnBiasType, AttnMaskType, AttnSoftmaxType, CPStrategy, QKVLayout
from .sequences import SequenceDescriptor

Window = tuple[int, int] | None
Described = SequenceDescriptor | Array | None


@dataclass(frozen=True, eq=False)
class FusedAttn:
    """Arguments of `fused_attn`, in TransformerEngine's order."""

    qkv: tuple[Array, ...]
    bias: Array | None
    sequence_descriptor: Described
    seed: Array | None
    attn_bias_type: AttnBiasType
    attn_mask_type: AttnMaskType
    qkv_layout: QKVLayout
    softmax_type: AttnSoftmaxType
    scaling_factor: float
    dropout_probability: float
    is_training: bool
    max_segments_per_seq: int = 1
    window_size: Window = None
    context_parallel_strategy: CPStrategy = CPStrategy.DEFAULT
    context_parallel_causal_load_balanced: bool = False
    context_parallel_axis: str = ""
    context_checkpoint_name: str = "context"
    softmax_offset: Array | None = None
    stripe_size: int | None = None
    score_mod: Callable[..., Any] | None = None
    score_mod_bprop: Callable[..., Any] | None = None
    score_mod_tensors: Mapping[str, Any] | None = None
    score_mod_bprop_tensors: Mapping[str, Any] | None = None


@taking(FusedAttn)
def fused_attn(call: FusedAttn) -> Array:
    """Attention with the arguments of TransformerEngine's JAX package: the output, [b, s, h, d].

    qkv: one, two or three arrays, as the layout says, [b, s, …] whatever it is; layouts of THD have
    several segments in each row, at most max_segments_per_seq. sequence_descriptor: lengths, of
    masks with padding alone; or bool [b, 1, s_q, s_kv], True where padding is. seed: of dropout
    while training, uint32 words or a key, of which one of several devices is read.
    docs/guide/jax.md says what is refused.

    Raises: SpecError with every violation at once, while the call is traced.
    """
    return computed(call, "auto")


def computed(call: FusedAttn, backend: str) -> Array:
    """`fused_attn` on a backend of `attention`. Raises: as that."""
    if reasons := [*_refusals(call)]:
        raise SpecError(reasons)
    if call.context_parallel_axis:
        return _over_devices(call, backend)
    if call.max_segments_per_seq > 1 and not call.qkv_layout.is_thd():
        warnings.warn("max_segments_per_seq is of layouts of THD alone", UserWarning, stacklevel=4)
    given = {**_given(call, backend), "layout": call.qkv_layout.value}
    q, *_ = call.qkv
    *_, last = call.qkv
    if not call.qkv_layout.is_thd():
        return _attend(call, call.qkv, {**given, **_lengths(call)})
    packed = tuple(x.reshape(-1, *x.shape[2:]) for x in call.qkv)
    out = _attend(call, packed, {**given, **_segments(call, (q.shape[1], last.shape[1]))})
    return out.reshape(*q.shape[:2], *out.shape[1:])


def _given(call: FusedAttn, backend: str) -> dict[str, Any]:
    """Arguments of `attention`, but for q, k, v, their layout and lengths."""
    given: dict[str, Any] = {
        "mask": call.attn_mask_type.value,
        "softmax": call.softmax_type.value,
        "softmax_scale": call.scaling_factor,
        "window": call.window_size,
        "backend": backend,
    }
    if call.attn_bias_type is not AttnBiasType.NO_BIAS:
        given |= {"bias": call.bias, "bias_type": call.attn_bias_type.value}
    if call.softmax_type is AttnSoftmaxType.LEARNABLE_SOFTMAX and call.softmax_offset is not None:
        given["sink"] = call.softmax_offset.reshape(-1)
    if call.is_training and call.dropout_probability > 0:
        given |= {"dropout_p": call.dropout_probability, "rng_state": _state(call.seed)}
    return given


def _attend(call: FusedAttn, carriers: tuple[Array, ...], given: dict[str, Any]) -> Array:
    named = dict(zip(("q", "k", "v"), (*carriers, None, None), strict=False))
    found = attend(make_call("fused_attn", ROWS, named, given), call.context_checkpoint_name)
    assert not isinstance(found, tuple)  # by-products are not asked for
    return found


def _refusals(call: FusedAttn) -> list[str]:
    reasons: list[str] = []
    if call.context_parallel_axis and call.qkv_layout.is_thd():
        reasons += _refused_of_segments(call)
    elif call.stripe_size is not None and not call.context_parallel_axis:
        reasons.append("stripe_size belongs to context_parallel_axis; leave it out")
    mods = (call.score_mod, call.score_mod_bprop)
    if any(x is not None for x in (*mods, call.score_mod_tensors, call.score_mod_bprop_tensors)):
        reasons.append("score_mod of cuDNN's graphs has no kernels; pass a bias, or leave it out")
    wanted = 1 if call.qkv_layout.is_qkvpacked() else 2 if call.qkv_layout.is_kvpacked() else 3
    if len(call.qkv) != wanted:
        reasons.append(f"{call.qkv_layout} needs {wanted} arrays in qkv; got {len(call.qkv)}")
    if (call.bias is None) != (call.attn_bias_type is AttnBiasType.NO_BIAS):
        reasons.append(f"{call.attn_bias_type} and bias do not agree: pass both, or neither")
    if call.qkv_layout.is_thd() and not call.attn_mask_type.is_padding():
        reasons.append(f"{call.qkv_layout} needs a mask with padding; got {call.attn_mask_type}")
    return reasons


def _refused_of_segments(call: FusedAttn) -> Iterator[str]:
    """Why rows of several segments cannot be spread over an axis."""
    described = call.sequence_descriptor
    both = f"context_parallel_axis={call.context_parallel_axis!r} beside {call.qkv_layout}"
    if not isinstance(described, SequenceDescriptor) or not described.has_ids:
        yield f"{both} needs a SequenceDescriptor.from_segment_ids_and_pos"
    if call.bias is not None:
        yield f"{both} takes no bias"
    if call.is_training and call.dropout_probability > 0:
        yield f"{both} has no dropout: which weights it drops would depend on the devices"


def _segments_over_devices(call: FusedAttn, backend: str) -> Array:
    """The output of the device's part of rows of several segments, whose numbers are traced: in any
    order of tokens, by booleans of the device's queries and all keys."""
    described, axis = call.sequence_descriptor, call.context_parallel_axis
    assert isinstance(described, SequenceDescriptor)  # checked with the call
    shown = described.shown_over(
        axis,
        call.max_segments_per_seq,
        call.window_size or (-1, -1),
        (call.attn_mask_type.is_causal(), call.attn_mask_type.is_bottom_right()),
    )
    given = {**_given(call, backend), "mask": "none", "window": None, "attn_mask": shown[:, None]}
    over = Spread(
        axis, call.context_parallel_strategy, "contiguous", jnp.float32,
        call.context_checkpoint_name,
    )  # fmt: skip
    out = attend_spread(*_separate(call), over, given)
    assert not isinstance(out, tuple)  # by-products are not asked for
    return out


def _over_devices(call: FusedAttn, backend: str) -> Array:
    """The output of the device's part of the sequences."""
    if call.qkv_layout.is_thd():
        return _segments_over_devices(call, backend)
    axis, stripe = call.context_parallel_axis, call.stripe_size
    order: AnyOrder = "contiguous"
    if call.context_parallel_causal_load_balanced:
        order = "dual_chunk"
    if stripe is not None:
        order = "striped", stripe
    over = Spread(
        axis, call.context_parallel_strategy, order, jnp.float32, call.context_checkpoint_name
    )
    q, k, v = _separate(call)
    out = attend_spread(q, k, v, over, {**_given(call, backend), **_lengths(call, axis)})
    assert not isinstance(out, tuple)  # by-products are not asked for
    return out


def _separate(call: FusedAttn) -> tuple[Array, Array, Array]:
    """q, k and v, of which some may be parts of an array."""
    *own, last = call.qkv
    count = 4 - len(call.qkv)
    parts = [last] if count == 1 else [jnp.take(last, n, axis=2) for n in range(count)]
    q, k, v = (*own, *parts)
    return q, k, v


def _state(seed: Array | None) -> Any:
    """The first of a seed's rows, of which there is one a device."""
    if seed is None:
        raise SpecError("dropout while training needs a seed; got None")
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    rows = seed.reshape(-1, seed.shape[-1])
    return jax.lax.index_in_dim(rows, 0, keepdims=False)


def _lengths(call: FusedAttn, axis: str = "") -> dict[str, Any]:
    """Lengths of a call whose rows are a sequence each, under masks with padding. axis: of the mesh
    along which these are spread."""
    described = call.sequence_descriptor
    if not call.attn_mask_type.is_padding():
        return {}
    if described is None:
        raise SpecError(f"{call.attn_mask_type} needs a sequence_descriptor; got None")
    if isinstance(described, SequenceDescriptor):
        q, kv = described.lengths()
        if axis and described.has_ids:
            q, kv = (jax.lax.psum(x, axis) for x in (q, kv))
    elif axis:
        raise SpecError(f"context_parallel_axis={axis!r} needs a SequenceDescriptor; got a mask")
    else:
        q, kv = _lengths_of_mask(jnp.logical_not(described), call.attn_mask_type)
    return {"seqused_q": q, "seqused_kv": kv}


def _lengths_of_mask(shown: Array, mask: AttnMaskType) -> tuple[Array, Array]:
    """Lengths [b] of a mask [b, 1, s_q, s_kv], True where a pair is seen."""
    shown = shown.reshape(shown.shape[0], *shown.shape[2:])
    columns = shown.sum(1, dtype=jnp.int32)
    rows = shown.sum(2, dtype=jnp.int32)
    if mask is AttnMaskType.PADDING_MASK:
        return columns.max(-1), rows.max(-1)
    return jax.lax.index_in_dim(columns, 0, axis=1, keepdims=False), rows.max(-1)


def _segments(call: FusedAttn, tokens: tuple[int, int]) -> dict[str, Any]:
    """Lengths of a call with several segments a row. tokens: of a row of queries, and of keys."""
    described = call.sequence_descriptor
    if not isinstance(described, SequenceDescriptor):
        raise SpecError(f"{call.qkv_layout} needs a SequenceDescriptor; got {described!r}")
    q, kv = described.packed(tokens, call.max_segments_per_seq)
    return {
        "cu_seqlens_q": q.ends,
        "cu_seqlens_q_padded": q.starts,
        "cu_seqlens_kv": kv.ends,
        "cu_seqlens_kv_padded": kv.starts,
    }


@dataclass(frozen=True, eq=False)
class KernelQuestion:
    """Arguments of `is_fused_attn_kernel_available`, in TransformerEngine's order."""

    is_training: bool
    q_dtype: Any
    kv_dtype: Any
    qkv_layout: QKVLayout
    attn_bias_type: AttnBiasType
    attn_mask_type: AttnMaskType
    softmax_type: AttnSoftmaxType
    dropout_probability: float
    q_num_heads: int
    kv_num_heads: int
    q_max_seqlen: int
    kv_max_seqlen: int
    head_dim_qk: int
    head_dim_v: int
    window_size: Window = None


@taking(KernelQuestion)
def is_fused_attn_kernel_available(asked: KernelQuestion) -> bool:
    """Whether kernels serve such calls, on a GPU that has any; others run the definition."""
    q, kv = (jnp.dtype(each).name for each in (asked.q_dtype, asked.kv_dtype))
    keys = 1, asked.kv_max_seqlen, asked.kv_num_heads
    queries = 1, asked.q_max_seqlen, asked.q_num_heads, asked.head_dim_qk
    own: dict[str, Any] = {
        "q": TensorDesc.contiguous(queries, q),
        "k": TensorDesc.contiguous((*keys, asked.head_dim_qk), kv),
        "v": TensorDesc.contiguous((*keys, asked.head_dim_v), kv),
    }
    if asked.attn_bias_type is not AttnBiasType.NO_BIAS:
        own |= {
            "bias": TensorDesc.contiguous((1, 1, 1, 1), q),
            "bias_type": asked.attn_bias_type.value,
        }
    call = AttentionCall(
        **own,
        mask=asked.attn_mask_type.value,
        window=asked.window_size or (-1, -1),
        softmax=asked.softmax_type.value,
        dropout_p=asked.dropout_probability if asked.is_training else 0.0,
    )
    return not routing.refusals(call)


def make_swa_mask(
    segment_pos_q: Array,
    segment_pos_kv: Array,
    window_size: Window = None,
    dtype: Any = jnp.float32,
    segment_ids_q: Array | None = None,
    segment_ids_kv: Array | None = None,
) -> Array:
    """A mask of a window, [b, 1, s_q, s_kv], 1 where a query sees a key.

    segment_pos: positions in their segments, [b, s]; window_size: keys before and behind each, a
    negative one unbounded. segment_ids: with both of them positions count from the ends of
    segments, and a query sees no later key, as under a causal mask of the bottom right.
    """
    left, right = ((np.inf if side < 0 else side) for side in window_size or (-1, -1))
    q, kv = segment_pos_q[..., :, None], segment_pos_kv[..., None, :]
    if segment_ids_q is not None and segment_ids_kv is not None:
        q = _run_lengths(segment_ids_q)[..., :, None] - q
        kv = _run_lengths(segment_ids_kv)[..., None, :] - kv
        seen = q + left >= kv
    else:
        seen = (kv >= q - left) & (kv <= q + right)
    return seen[..., None, :, :].astype(dtype)


def _run_lengths(ids: Array) -> Array:
    """The length of the run of equal numbers that each token is in, 0 of padding; [b, s]."""
    flat = ids.reshape(-1, ids.shape[-1])
    begins = jnp.pad(flat[:, 1:] != flat[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    runs = jnp.cumsum(begins, axis=1) - 1
    sizes = (runs[:, :, None] == runs[:, None, :]).sum(-1)
    return jnp.where(flat == 0, 0, sizes).reshape(ids.shape)
