"""Arguments of `DotProductAttention` and of its calls, and the tensors that these have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ...errors import SpecError
from ...spec.attention_spec import MAX_TRAINED_HEAD_DIM
from ...spec.layouts import Layout, check_operands, parse, shape_of, size
from .masks import Masks
from .variants import batch_of


@dataclass(slots=True)
class Settings:
    """Arguments of the constructor, in TransformerEngine's order."""

    num_attention_heads: int
    kv_channels: int | tuple[int, int]
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    qkv_format: str = "sbhd"
    attn_mask_type: str = "causal"
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool | None = None
    sequence_parallel: bool = False
    tp_size: int = 1
    get_rng_state_tracker: Callable[[], Any] | None = None
    tp_group: Any = None
    layer_number: int | None = None
    attention_type: str = "self"
    cp_group: Any = None
    cp_global_ranks: Any = None
    cp_stream: Any = None
    cp_comm_type: str = "p2p"
    softmax_scale: float | None = None
    softmax_type: str = "vanilla"
    return_max_logit: bool | None = False
    name: str | None = None


@dataclass(slots=True)
class Call:
    """Arguments of a call, in TransformerEngine's order."""

    query_layer: Tensor | None = None
    key_layer: Tensor | None = None
    value_layer: Tensor | None = None
    attention_mask: Masks = None
    qkv_format: str | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    attn_mask_type: str | None = None
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool | None = None
    checkpoint_core_attention: bool = False
    core_attention_bias_type: str = "no_bias"
    core_attention_bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    fast_zero_fill: bool = True
    inference_params: Any = None
    pad_between_seqs: bool | None = None
    fp8_output: bool | None = False
    bf16_backward: bool | None = False
    num_splits: int | None = 1
    score_mod: Any = None
    score_mod_bprop: Any = None
    score_mod_tensors: Any = None
    score_mod_bprop_tensors: Any = None
    qkv_layer: Tensor | None = None
    kv_layer: Tensor | None = None
    qkv_interleave_dim: int = -3


# Tensors of a call beside its carriers; of `inference_params` come others.
LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
TENSORS = (*LENGTHS, "attention_mask", "core_attention_bias", "alibi_slopes")


class Carriers(NamedTuple):
    """Tensors of a call as its layout has them: K and V are None where they are packed."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None


class Sizes(NamedTuple):
    """Sizes of a call's tensors on which the choice of a backend depends."""

    heads: int
    groups: int
    queries: int
    keys: int
    dim: int
    dim_v: int

    @property
    def have_backward(self) -> bool:
        """Whether kernels of these head dims have a backward."""
        return max(self.dim, self.dim_v) <= MAX_TRAINED_HEAD_DIM

    @classmethod
    def of(cls, layout: str, carriers: Carriers) -> Sizes:
        """The sizes of a call's tensors; of packed tokens all are counted. Raises: SpecError where
        a tensor has another number of axes than its layout."""
        try:
            return cls._of(parse(layout), carriers)
        except IndexError:
            check_operands(parse(layout), *carriers)
            raise

    @classmethod
    def _of(cls, parsed: Layout, carriers: Carriers) -> Sizes:
        q, k, v = carriers
        of_q, of_k = (shape_of(parsed, name, q, k) for name in ("q", "k"))
        q_axes, k_axes = parsed.formats
        return cls(
            heads=size(of_q, q_axes, "h"),
            groups=size(of_k, k_axes, "h"),
            queries=size(of_q, q_axes, "t" if q_axes == "thd" else "s"),
            keys=size(of_k, k_axes, "t" if k_axes == "thd" else "s"),
            dim=size(of_q, q_axes, "d"),
            dim_v=size(of_k if v is None else v.shape, k_axes, "d"),
        )


def carriers_of(call: Call, axes: str) -> tuple[str, Carriers]:
    """The layout and the tensors of a call. Raises: SpecError where there are too few or many."""
    q, k, v = call.query_layer, call.key_layer, call.value_layer
    if call.qkv_layer is None and call.kv_layer is None:
        if q is None or k is None or v is None:
            raise SpecError("pass query_layer, key_layer and value_layer, or packed ones")
        return three_of(axes), Carriers(q, k, v)
    if call.inference_params is not None:
        raise SpecError("a KV cache takes keys and values of their own, not packed ones")
    place = call.qkv_interleave_dim
    if place not in (-3, -2):
        raise SpecError(f"qkv_interleave_dim={place}; allowed: -3, -2")
    packed = call.qkv_layer if call.kv_layer is None else call.kv_layer
    parts = "3" if call.kv_layer is None else "2"
    at = len(axes) + place + 1
    name = axes[:at] + parts + axes[at:]
    if call.kv_layer is None:
        if q is not None or k is not None or v is not None:
            raise SpecError("qkv_layer packs queries, keys and values: pass it alone")
        return name, Carriers(packed, None, None)  # type: ignore[arg-type]
    if call.qkv_layer is not None or q is None or k is not None or v is not None:
        raise SpecError("kv_layer packs key_layer and value_layer: pass it with query_layer alone")
    return f"{axes}_{name}", Carriers(q, packed, None)


def three_of(axes: str, kv_axes: str | None = None) -> str:
    """The layout of three tensors, Q in this format and K and V in that or another."""
    other = axes if kv_axes is None else kv_axes
    return f"{axes}_{other}_{other}"


def sequences_of(layout: str, carriers: Carriers) -> int | None:
    """How many sequences a call's dense tensors have; None of packed tokens."""
    q, k, _ = carriers  # whose packed axis comes behind that of sequences
    return batch_of(layout, q, q if k is None else k)


def tensors_of(call: Call) -> Carriers:
    """The tensors of a call that `carriers_of` has found to fit."""
    if call.qkv_layer is not None:
        return Carriers(call.qkv_layer, None, None)
    q: Tensor = call.query_layer  # type: ignore[assignment]  # which was found to be there
    if call.kv_layer is not None:
        return Carriers(q, call.kv_layer, None)
    return Carriers(q, call.key_layer, call.value_layer)


# Arguments of which calls have forms of their own, and those that may stand before them.
_OTHERS = frozenset({"qkv_layer", "kv_layer", "inference_params", "checkpoint_core_attention"})
_BEFORE_OTHERS = 14
_TENSORS_FIRST = 3
_LONGEST = ("max_seqlen_q", "max_seqlen_kv")  # which no plan knows
_BEFORE_LONGEST = 9


def form_of_arguments(args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, ...] | None:
    """A call of three tensors and others, but for numbers in them, their longest lengths, and how
    many packed tokens and sequences there are, from its arguments as they are given; None where
    `form_of` its `Call` tells forms apart."""
    if not _TENSORS_FIRST <= len(args) <= _BEFORE_OTHERS or not _OTHERS.isdisjoint(given):
        return None
    q, k, v, *rest = args
    form = _carrier_form(q), _carrier_form(k), _carrier_form(v)
    if rest:
        places = range(_TENSORS_FIRST, len(args))
        longest = range(_BEFORE_LONGEST, _BEFORE_LONGEST + len(_LONGEST))
        pairs = zip(places, rest, strict=True)
        form += tuple(None if place in longest else _form_of_one(x) for place, x in pairs)
    if given:
        form += tuple((name, _form_of_one(x)) for name, x in given.items() if name not in _LONGEST)
    return form


def _carrier_form(x: Any) -> Any:
    if x is None:
        return None
    shape = x.shape
    return shape if len(shape) != 3 else shape[1:], x.dtype


def _form_of_one(x: Any) -> Any:
    if isinstance(x, Tensor):
        return Tensor, x.requires_grad
    return tuple(map(_form_of_one, x)) if isinstance(x, (tuple, list)) else x


def form_of(call: Call) -> tuple[Any, ...]:
    """A call but for numbers in its tensors, and how many packed tokens there are."""
    q, packed = call.query_layer, call.qkv_layer
    cache, bias = call.inference_params, call.core_attention_bias
    first = q if packed is None else packed
    window = None if call.window_size is None else tuple(call.window_size)
    return (
        (call.qkv_format, call.attn_mask_type, window, call.bottom_right_diagonal),
        (call.core_attention_bias_type, call.num_splits, call.qkv_interleave_dim),
        None if first is None else first.dtype,
        None if q is None else q.shape[q.ndim == 3 :],
        None if (k := call.key_layer) is None else k.shape[k.ndim == 3 :],
        None if (v := call.value_layer) is None else v.shape[v.ndim == 3 :],
        None if packed is None else packed.shape[packed.ndim == 4 :],
        None if (kv := call.kv_layer) is None else kv.shape[kv.ndim == 4 :],
        (call.cu_seqlens_q is None, call.cu_seqlens_kv is None, type(call.attention_mask)),
        (call.cu_seqlens_q_padded is None, call.cu_seqlens_kv_padded is None),
        (call.alibi_slopes is None, bias is None or bias.requires_grad, bias is None),
        None if cache is None else (cache.reads_pages, cache.max_batch_size),
        call.score_mod is None,
    )
