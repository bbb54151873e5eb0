"""TransformerEngine's flax module of attention, computed by attngen."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import linen
from jax import Array

from ...errors import SpecError
from .fused_attn import FusedAttn, Window, computed
from .names import (
    AttnBiasType,
    AttnSoftmaxType,
    CPStrategy,
    QKVLayout,
    canonicalize_attn_mask_type,
)
from .sequences import SequenceDescriptor

HEAD_AXES = "nvte_head"  # TransformerEngine's logical axis of heads
FUSED = "NVTE_FUSED_ATTN"


class _FusedDotProductAttention(linen.Module):
    """The parameters of a learnable softmax, where TransformerEngine's checkpoints have them."""

    @linen.compact
    def __call__(self, heads: int) -> Array:
        axes = (None, HEAD_AXES, None, None)
        made = linen.with_logical_partitioning(linen.initializers.zeros, axes)
        offset: Any = self.param("softmax_offset", made, (1, heads, 1, 1), jnp.float32)
        return offset  # type: ignore[no-any-return]  # without its box of axes


class DotProductAttention(linen.Module):
    """Attention with the constructor of TransformerEngine's flax module.

    attn_mask_type, attn_bias_type, softmax_type, qkv_layout, context_parallel_strategy: words;
    attn_bias_type None is post_scale_bias where a bias is given. scale_factor None is 1/√d.
    transpose_batch_sequence: arrays are [s, b, …]. num_gqa_groups and float32_logits change
    nothing: heads are read off the arrays, and scores are float32. NVTE_FUSED_ATTN=0 asks for the
    definition in jax.numpy.
    """

    head_dim: int
    num_attention_heads: int
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    attn_mask_type: str = "causal"
    attn_bias_type: str | None = None
    dtype: Any = None
    dropout_rng_name: str = "dropout"
    float32_logits: bool = False
    qkv_layout: str = "bshd_bshd_bshd"
    scale_factor: float | None = None
    transpose_batch_sequence: bool | None = None
    window_size: Window = None
    max_segments_per_seq: int | None = 1
    context_parallel_causal_load_balanced: bool = False
    context_parallel_axis: str = ""
    context_parallel_strategy: str = "DEFAULT"
    context_checkpoint_name: str = "context"
    softmax_type: str = "vanilla"
    score_mod: Callable[..., Any] | None = None
    score_mod_bprop: Callable[..., Any] | None = None

    @linen.compact
    def __call__(
        self,
        query: Array,
        key: Array | None = None,
        value: Array | None = None,
        sequence_descriptor: SequenceDescriptor | Array | None = None,
        bias: Array | None = None,
        *,
        deterministic: bool = False,
        mask: SequenceDescriptor | Array | None = None,
        **score_mod_tensors: Mapping[str, Any] | None,
    ) -> Array:
        """The output, [b, s, h, d], or [s, b, h, d] of arrays in that order.

        query, key, value: as `qkv_layout` has them, of packed ones the first alone or the first
        two; other arguments as of `fused_attn`. deterministic: no dropout. mask: an older name of
        sequence_descriptor.

        Raises: SpecError with every violation at once, while the call is traced.
        """
        if self.dtype is not None and self.dtype != query.dtype:
            raise SpecError(f"dtype={self.dtype} is not the arrays', {query.dtype}; leave it out")
        if mask is not None:
            if sequence_descriptor is not None:
                raise SpecError("sequence_descriptor and mask are one argument. Pass one of them.")
            warnings.warn("mask is called sequence_descriptor now", stacklevel=2)
            sequence_descriptor = mask
        layout = QKVLayout[self.qkv_layout.upper()]
        wanted = 1 if layout.is_qkvpacked() else 2 if layout.is_kvpacked() else 3
        arrays = tuple([x for x in (query, key, value)[:wanted] if x is not None])
        if self.transpose_batch_sequence:
            arrays = tuple(x.swapaxes(0, 1) for x in arrays)
        kind = AttnSoftmaxType.from_str(self.softmax_type)
        seed, offset = None, None
        if not deterministic and self.attention_dropout > 0:
            seed = self.make_rng(self.dropout_rng_name)
        if kind is AttnSoftmaxType.LEARNABLE_SOFTMAX:
            offset = _FusedDotProductAttention()(query.shape[-2])
        call = FusedAttn(
            qkv=arrays,
            bias=None if bias is None else bias.astype(query.dtype),
            sequence_descriptor=sequence_descriptor,
            seed=seed,
            attn_bias_type=self._bias_type(bias),
            attn_mask_type=canonicalize_attn_mask_type(self.attn_mask_type),
            qkv_layout=layout,
            softmax_type=kind,
            scaling_factor=self._scale(query),
            dropout_probability=self.attention_dropout,
            is_training=not deterministic,
            max_segments_per_seq=self.max_segments_per_seq or 1,
            window_size=self.window_size,
            context_parallel_strategy=self._strategy(),
            context_parallel_causal_load_balanced=self.context_parallel_causal_load_balanced,
            context_parallel_axis=self.context_parallel_axis,
            context_checkpoint_name=self.context_checkpoint_name,
            softmax_offset=offset,
            score_mod=self.score_mod,
            score_mod_bprop=self.score_mod_bprop,
            **score_mod_tensors,  # type: ignore[arg-type]  # by their names
        )
        out = computed(call, "reference" if os.getenv(FUSED, "1") == "0" else "auto")
        return out.swapaxes(0, 1) if self.transpose_batch_sequence else out

    def _bias_type(self, bias: Array | None) -> AttnBiasType:
        if self.attn_bias_type is None:
            return AttnBiasType.NO_BIAS if bias is None else AttnBiasType.POST_SCALE_BIAS
        return AttnBiasType[self.attn_bias_type.upper()]

    def _scale(self, query: Array) -> float:
        return 1 / math.sqrt(query.shape[-1]) if self.scale_factor is None else self.scale_factor

    def _strategy(self) -> CPStrategy:
        word = self.context_parallel_strategy.upper().replace("ALLGATHER", "ALL_GATHER")
        if word not in CPStrategy.__members__:
            known = ", ".join(CPStrategy.__members__)
            raise SpecError(f"context_parallel_strategy={word!r} is none. Use one of {known}.")
        return CPStrategy[word]
