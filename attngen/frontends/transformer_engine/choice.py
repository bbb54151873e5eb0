"""Choice of a backend for calls of `DotProductAttention`, kept for calls like them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...call.kept import Kept
from ...errors import SpecError
from .calls import Sizes
from .core import Words
from .environment import SWITCHES, enabled
from .selection import AttentionParams, get_attention_backend

_attention_backends: dict[str, Any] = {
    "attention_params": None,
    "use_flash_attention": None,
    "flash_attention_backend": None,
    "use_fused_attention": None,
    "fused_attention_backend": None,
    "use_unfused_attention": None,
    "backend_selection_requires_update": False,
}
"""The last choice of a backend. Whoever changes an environment variable sets
`backend_selection_requires_update`, which has the next call choose anew."""
MANY_POSITIONS = 256  # from which on the number of queries or keys decides no kernel


class Choices:
    """Backends of calls like earlier ones, and how often they were forgotten."""

    def __init__(self) -> None:
        self.kept: Kept[str] = Kept()
        self._times = 0

    def number(self) -> int:
        """A number that is another one whenever backends are to be chosen anew."""
        if _attention_backends["backend_selection_requires_update"]:
            _attention_backends["backend_selection_requires_update"] = False
            self.kept.clear()
            self._times += 1
        return self._times


choices = Choices()


@dataclass(frozen=True)
class Facts:
    """Facts about a call on which the choice depends, beside words and sizes. recipe: of FP8; None
    in 16 bits."""

    dtype: torch.dtype
    training: bool
    deterministic: bool
    max_logit: bool
    num_splits: int | None
    bias_has_gradient: bool
    recipe: Any = None


def backend_of(words: Words, sizes: Sizes, facts: Facts, cache: Any) -> str:
    """The one of attngen's backends that computes a call: as `get_attention_backend` chooses, and
    in code that torch.compile traces as environment variables say alone, since attngen itself takes
    the definition where kernels refuse. cache: the call's InferenceParams.

    Raises: ValueError where none may.
    """
    if torch.compiler.is_compiling():
        fused, flash, unfused = map(enabled, SWITCHES)
        return _attngens(fused or flash, unfused)
    positions = min(sizes.queries, MANY_POSITIONS), min(sizes.keys, MANY_POSITIONS)
    rest = (sizes.heads, sizes.groups, sizes.dim, sizes.dim_v)
    key = (choices.number(), words, facts, positions, rest, cache is not None)
    return choices.kept.find(key, lambda: _choose(words, sizes, facts, cache))


def _choose(words: Words, sizes: Sizes, facts: Facts, cache: Any) -> str:
    params = AttentionParams(
        qkv_dtype=facts.dtype,
        qkv_layout=words.layout,
        num_heads=sizes.heads,
        num_gqa_groups=sizes.groups,
        max_seqlen_q=sizes.queries,
        max_seqlen_kv=sizes.keys,
        head_dim_qk=sizes.dim,
        head_dim_v=sizes.dim_v,
        attn_mask_type=words.mask,
        window_size=words.window,
        bottom_right_diagonal=words.bottom_right,
        core_attention_bias_type=words.bias,
        core_attention_bias_requires_grad=facts.bias_has_gradient,
        attention_dropout=words.dropout,
        deterministic=facts.deterministic,
        is_training=facts.training,
        inference_params=cache,
        softmax_type=words.softmax,
        return_max_logit=facts.max_logit,
        cuda_graph=_is_capturing(),
        num_splits=facts.num_splits or 1,
        fp8=facts.recipe is not None,
        fp8_meta=None if facts.recipe is None else {"recipe": facts.recipe},
    )
    chosen = get_attention_backend(params)
    found = {name: x for name, x in chosen._asdict().items() if name in _attention_backends}
    _attention_backends.update(found)
    _attention_backends["attention_params"] = params
    fused = chosen.use_fused_attention or chosen.use_flash_attention
    return _attngens(fused, chosen.use_unfused_attention)


def _attngens(fused: bool, unfused: bool) -> str:
    """The name of attngen's backend. Raises: ValueError where there is none."""
    if fused:
        _, _, falls_back = map(enabled, SWITCHES)
        return "auto" if falls_back or not torch.cuda.is_available() else "cuda"
    if unfused:
        return "reference"
    raise SpecError(
        "no backend may compute this call; NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 logs the reasons"
    )


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
