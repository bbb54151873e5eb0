"""Backends of core attention as modules: fused and flash, on attngen's kernels, and unfused, which
is the definition in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import SpecError
from ...spec.layouts import parse
from .arguments import method_taking
from .calls import TENSORS
from .core import How, Output, Words, plan_of
from .layouts import separate
from .masks import Masks, check_set_window_size, ends_at_corner, mask_name
from .names import FusedAttnBackend
from .variants import batch_of, refuse_fp8


@dataclass(slots=True)
class CoreArguments:
    """Arguments of the backends' forwards. query_layer, key_layer and value_layer are three views
    in the formats of qkv_layout."""

    query_layer: Tensor
    key_layer: Tensor
    value_layer: Tensor
    attention_mask: Masks = None
    qkv_layout: str = "sbh3d"
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    attn_mask_type: str = "causal"
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool | None = None
    fused_attention_backend: Any = FusedAttnBackend.No_Backend
    flash_attention_backend: Any = None
    core_attention_bias_type: str = "no_bias"
    core_attention_bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    fast_zero_fill: bool = True
    cp_group: Any = None
    cp_global_ranks: Any = None
    cp_stream: Any = None
    cp_comm_type: str = "p2p"
    fp8: bool = False
    fp8_meta: Any = None
    quantizers: Any = None
    pad_between_seqs: bool | None = False
    inference_params: Any = None
    softmax_offset: Tensor | None = None
    fp8_output: bool = False
    num_splits: int | None = 1


@dataclass(slots=True)
class Settings:
    """Arguments of the backends' constructors."""

    softmax_scale: float
    attention_dropout: float = 0.0
    attention_dropout_ctx: Callable[[], Any] = nullcontext
    attention_type: str = "self"
    layer_number: int | None = None
    deterministic: bool = False
    softmax_type: str = "vanilla"
    return_max_logit: bool = False


class CoreAttention(nn.Module):
    """Core attention on one of attngen's backends; the arguments of calls are `CoreArguments`."""

    backend = "auto"

    @method_taking(Settings)
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.softmax_scale = settings.softmax_scale
        self.attention_dropout = settings.attention_dropout
        self.attention_dropout_ctx = settings.attention_dropout_ctx
        self.attention_type = settings.attention_type
        self.layer_number = 1 if settings.layer_number is None else settings.layer_number
        self.deterministic = settings.deterministic
        self.softmax_type = settings.softmax_type
        self.return_max_logit = settings.return_max_logit

    @method_taking(CoreArguments)
    def forward(self, call: CoreArguments) -> Output:
        """The output […, h · d_v], or that and the largest logits [h]."""
        return self.attend(call)

    def attend(self, call: CoreArguments) -> Output:
        """Compute a call whose arguments are one value. Raises: as `attngen.attention` does."""
        refuse_fp8("fp8", call.fp8)
        if world_size(call.cp_group) > 1:
            refuse_context_parallelism()
        mask = mask_name(call.attn_mask_type)
        bias = call.core_attention_bias_type
        if call.alibi_slopes is not None and bias == "no_bias":
            bias = "alibi"
        layout = separate(call.qkv_layout)
        more: dict[str, Any] = {}
        if parse(layout).paged:
            more["page_table"] = call.inference_params.cache_manager.page_table
        carriers = (call.query_layer, call.key_layer, call.value_layer)
        q, k, _ = carriers
        words = Words(
            layout=layout,
            mask=mask,
            window=check_set_window_size(mask, call.window_size),
            bottom_right=ends_at_corner(mask, call.bottom_right_diagonal),
            softmax=self.softmax_type,
            bias=bias,
            softmax_scale=self.softmax_scale,
            dropout=self.attention_dropout if self.training else 0.0,
        )
        names = (*TENSORS, "softmax_offset")
        present = {*more, *(name for name in names if getattr(call, name) is not None)}
        batch = batch_of(layout, q, k, more.get("page_table"))
        return plan_of(words, self.how(call.num_splits), batch, present)(carriers, call, more)

    def how(self, num_splits: int | None, backend: str | None = None) -> How:
        """How this backend computes a call. backend: one of attngen's, instead of its own."""
        return How(
            backend=self.backend if backend is None else backend,
            context=self.attention_dropout_ctx,
            deterministic=True if self.deterministic else None,
            max_logit=self.return_max_logit,
            num_splits=None if self.training or (num_splits or 0) <= 1 else num_splits,
        )


class FusedAttention(CoreAttention):
    """Core attention by attngen's kernels, or, where these refuse a call, by the definition, which
    is logged once."""

    def attend(self, call: CoreArguments) -> Output:
        """Raises: ValueError for FusedAttnBackend.No_Backend; as `attngen.attention` does."""
        backend = FusedAttnBackend.cast(call.fused_attention_backend)
        if backend == FusedAttnBackend.No_Backend:
            raise SpecError("fused_attention_backend is No_Backend: no kernel serves this call")
        refuse_fp8("FusedAttnBackend.FP8", backend == FusedAttnBackend.FP8)
        return super().attend(call)


class FlashAttention(CoreAttention):
    """Core attention by attngen's kernels under flash-attn's name."""


class UnfusedDotProductAttention(CoreAttention):
    """The definition in plain PyTorch: scores and softmax in float32, whole in memory, and the same
    dropout as kernels have. NVTE_APPLY_QK_LAYER_SCALING, which keeps 16-bit scores in their range,
    therefore has nothing to do."""

    backend = "reference"

    def forward(  # type: ignore[override]  # as TransformerEngine has it
        self, _alibi_cache: Any, *args: Any, **given: Any
    ) -> Output:
        """Compute a call. _alibi_cache: of ALiBi's slopes, and not read."""
        return super().forward(*args, **given)


def world_size(group: Any) -> int:
    """How many processes a group, or all groups of a list, have; 1 of none."""
    if group is None:
        return 1
    size = 1
    for each in group if isinstance(group, (list, tuple)) else [group]:
        size *= torch.distributed.get_world_size(each)
    return size


def refuse_context_parallelism() -> None:
    """Raises: SpecError."""
    raise SpecError(
        "cp_group has several processes, and modules of backends compute whole sequences: context "
        "parallelism is DotProductAttention's, by set_context_parallel_group"
    )
