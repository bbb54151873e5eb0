"""The arguments of `attention` that do not decide what it returns, for type checkers alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from ...call.table import MaskMod, ScoreMod, Window
from .schedule import Schedule


class Options(TypedDict, total=False):
    """Each has the name and the type that `attention` says; in the end those that attngen's own
    fragments add."""

    layout: str
    mask: str | Sequence[str] | None
    window: Window
    bottom_right: bool | None
    positions: Sequence[int | Tensor] | None
    attn_mask: Tensor | None
    softmax_scale: float | None
    softcap: float | None
    bias: Tensor | None
    bias_type: str
    alibi_slopes: Tensor | bool | None
    softmax: str
    sink: Tensor | None
    dropout_p: float
    rng_state: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_kv_padded: Tensor | None
    max_seqlen_q: int | Tensor | None
    max_seqlen_kv: int | Tensor | None
    seqused_q: Tensor | None
    seqused_kv: Tensor | None
    seqstart_q: Tensor | None
    seqstart_kv: Tensor | None
    page_table: Tensor | tuple[Tensor, Tensor] | None
    num_splits: int | None
    schedule: Schedule | None
    score_mod: ScoreMod | str | Sequence[str] | None
    mask_mod: MaskMod | None
    block_mask: Any
    descale_q: Tensor | None
    descale_k: Tensor | None
    descale_v: Tensor | None
    scale_s: Tensor | None
    descale_s: Tensor | None
    scale_o: Tensor | None
    out_dtype: torch.dtype | None
    out: Tensor | None
    out_layout: str
    deterministic: bool | None
    backend: str
    places: Tensor | None
    chunked: int
    prefix: int | Tensor
