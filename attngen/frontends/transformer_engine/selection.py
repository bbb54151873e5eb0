"""`get_attention_backend`: which of three modules computes a call, by rules that say why not.

A rule looks at the parameters of a call and returns why a backend cannot serve it, or None.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from ...call.fp8_scales import MIXED
from .environment import (
    DEBUG,
    DEBUG_LEVEL,
    FLASH_SWITCHES,
    FP8_BACKWARD,
    SWITCHES,
    enabled,
    setting,
)
from .kernels import Question, refusals
from .names import FusedAttnBackend

FLASH_INTERFACE = "3.0.0"  # of flash-attn, whose arguments `FlashAttention` takes
UNFUSED = "UnfusedDotProductAttention"


@dataclass(eq=False)
class AttentionParams:
    """Facts on which the choice of a backend depends, by TransformerEngine's names and defaults."""

    qkv_type: Any = torch.Tensor
    qkv_dtype: torch.dtype = torch.bfloat16
    qkv_layout: str = "sbh3d"
    batch_size: int = 1
    num_heads: int = 16
    num_gqa_groups: int = 16
    max_seqlen_q: int = 128
    max_seqlen_kv: int = 128
    head_dim_qk: int = 64
    head_dim_v: int = 64
    attn_mask_type: str = "no_mask"
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool = True
    alibi_slopes_shape: Any = None
    core_attention_bias_type: str = "no_bias"
    core_attention_bias_shape: str | None = "1hss"
    core_attention_bias_requires_grad: bool = True
    pad_between_seqs: bool = False
    attention_dropout: float = 0.0
    context_parallel: bool = False
    cp_comm_type: str = "p2p"
    cp_size: int = 1
    deterministic: bool = False
    is_training: bool = True
    fp8: bool = False
    fp8_meta: Mapping[str, Any] | None = None
    inference_params: Any = None
    softmax_type: str = "vanilla"
    return_max_logit: bool = False
    cuda_graph: bool = False
    num_splits: int = 1
    fp8_output: bool = False
    checkpoint_core_attention: bool = False
    has_score_mod: bool = False
    has_score_mod_bprop: bool = False

    def __eq__(self, other: object) -> bool:
        """Whether the choice is the same: of fp8_meta its recipe alone counts."""
        if not isinstance(other, AttentionParams):
            return NotImplemented
        return all(
            _recipe_of(self) == _recipe_of(other)
            if each.name == "fp8_meta"
            else getattr(self, each.name) == getattr(other, each.name)
            for each in fields(self)
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def varies(self) -> bool:
        """Whether lengths are numbers on the device."""
        return "padding" in self.attn_mask_type or "thd" in self.qkv_layout

    @property
    def question(self) -> Question:
        """The call as `get_fused_attn_backend` is asked."""
        left, right = self.window_size or (-1, -1)
        return Question(
            self.is_training,
            self.qkv_dtype,
            self.qkv_dtype,
            self.qkv_layout,
            self.core_attention_bias_type,
            self.attn_mask_type,
            self.softmax_type,
            self.attention_dropout,
            self.num_heads,
            self.num_gqa_groups,
            self.max_seqlen_q,
            self.max_seqlen_kv,
            self.head_dim_qk,
            self.head_dim_v,
            left,
            right,
            self.return_max_logit,
            self.cuda_graph,
            self.deterministic,
        )


class Selection(NamedTuple):
    """The answer of `get_attention_backend`: the module that computes a call, and in the end which
    of flash, fused and unfused could."""

    use_flash_attention: bool
    flash_attention_backend: Any
    use_fused_attention: bool
    fused_attention_backend: FusedAttnBackend | None
    use_unfused_attention: bool
    available_backends: list[bool]


Rule = Callable[[AttentionParams], "str | None"]


def get_attention_backend(attention_params: AttentionParams) -> Selection:
    """The backend of a call: fused before flash before unfused, of those that no rule refuses.

    NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 logs the call and every reason.
    """
    set_log_level()
    logger = logging.getLogger("DotProductAttention")
    logger.debug("config = %s", attention_params)
    available = []
    for name, rules in RULES.items():
        reasons = [reason for rule in rules if (reason := rule(attention_params))]
        for reason in reasons:
            logger.debug("Disabling %s: %s", name, reason)
        available.append(not reasons)
    flash, fused, unfused = available
    if fused and flash:
        logger.debug("Disabling FlashAttention: the same kernels serve FusedAttention")
    order = ("FusedAttention", fused), ("FlashAttention", flash), (UNFUSED, unfused)
    kind = (
        FusedAttnBackend.FP8
        if is_in_8_bits(attention_params)
        else FusedAttnBackend.F16_arbitrary_seqlen
    )
    selected = next((name for name, serves in order if serves), "none")
    logger.debug("Selected backend = %s", selected)
    return Selection(
        flash and not fused,
        flash_version() if flash else None,
        fused,
        kind if fused else None,
        unfused and not (fused or flash),
        [flash, fused, unfused],
    )


def flash_version() -> Any:
    """The version of flash-attn whose interface `FlashAttention` has, as the package `packaging`
    compares versions, where that is installed."""
    try:
        from packaging.version import Version
    except ImportError:
        return FLASH_INTERFACE
    return Version(FLASH_INTERFACE)


_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)
_handler = logging.StreamHandler()
_handler.setFormatter(logging.Formatter("[%(levelname)-8s | %(name)-19s]: %(message)s"))


def set_log_level() -> None:
    """Have NVTE_DEBUG and NVTE_DEBUG_LEVEL (0, 1, 2) say what is logged of the choice."""
    level = 0
    if setting(DEBUG, "0") == "1":
        level = min(int(setting(DEBUG_LEVEL, "0")), len(_LEVELS) - 1)
    logger = logging.getLogger("DotProductAttention")
    logger.setLevel(_LEVELS[level])
    if level and not logger.hasHandlers():
        logger.addHandler(_handler)


# ---- rules


def _recipe_of(params: AttentionParams) -> Any:
    return (params.fp8_meta or {}).get("recipe")


def switched_off(*switches: str) -> Rule:
    """A rule that refuses where one of these environment variables is 0."""

    def rule(params: AttentionParams) -> str | None:
        off = [each for each in switches if not enabled(each)]
        return f"{', '.join(off)} = 0" if off else None

    return rule


def every_flash_is_off(params: AttentionParams) -> str | None:
    if any(map(enabled, FLASH_SWITCHES)):
        return None
    return f"{', '.join(FLASH_SWITCHES)} = 0"


def asks_for_fp8(params: AttentionParams) -> bool:
    """Whether the recipe in force has attention in FP8."""
    return params.fp8 and bool(getattr(_recipe_of(params), "fp8_dpa", True))


def is_in_8_bits(params: AttentionParams) -> bool:
    """Whether attention is in FP8, by a recipe or since its operands are."""
    return asks_for_fp8(params) or params.qkv_dtype.itemsize == 1


def flash_has_no_fp8(params: AttentionParams) -> str | None:
    if is_in_8_bits(params):
        return "FP8: FusedAttention has it, and the definition"
    return None


def has_scales_of_blocks(params: AttentionParams) -> str | None:
    recipe = type(_recipe_of(params)).__name__
    if asks_for_fp8(params) and "Block" in recipe:
        return f"{recipe}: attngen has one scale a tensor"
    return None


def has_no_such_output(params: AttentionParams) -> str | None:
    if params.fp8_output and not getattr(_recipe_of(params), "fp8_mha", True):
        return "fp8_output: the recipe has fp8_mha=False"
    return None


def trains_in_8_bits(recipe: Any) -> bool:
    """Whether a recipe has gradients made in 8 bits and nothing else: by attngen's word, or, of
    others, by NVTE_FP8_DPA_BWD."""
    backward = getattr(recipe, "backward", None)
    return enabled(FP8_BACKWARD) if backward is None else backward in ("fp8", MIXED)


def has_context_parallelism(params: AttentionParams) -> str | None:
    if params.context_parallel:
        return "context parallelism: attngen.te computes whole sequences alone"
    return None


def has_score_mod(params: AttentionParams) -> str | None:
    if params.has_score_mod:
        return (
            "score_mod: a callback of cuDNN's graphs; attngen.attention has a score_mod of its own"
        )
    return None


def has_no_floats(params: AttentionParams) -> str | None:
    if not params.qkv_dtype.is_floating_point:
        return f"qkv_dtype = {params.qkv_dtype}: no floats"
    return None


def packs_unlike_head_dims(params: AttentionParams) -> str | None:
    packed = any(digit in params.qkv_layout for digit in "23")
    if packed and params.head_dim_qk != params.head_dim_v:
        dims = f"{params.head_dim_qk} and {params.head_dim_v}"
        return f"qkv_layout = {params.qkv_layout}: a packed tensor has one head dim, not {dims}"
    return None


def kernels_refuse(params: AttentionParams) -> str | None:
    question = params.question
    if not asks_for_fp8(params):
        return "; ".join(refusals(question)) or None
    eight = replace(question, q_dtype=torch.float8_e4m3fn, kv_dtype=torch.float8_e4m3fn)
    if not question.is_training or trains_in_8_bits(_recipe_of(params)):
        return "; ".join(refusals(eight)) or None
    # A backward in 16 bits, of the numbers that the forward stored.
    forward = refusals(replace(eight, is_training=False))
    if question.q_dtype.itemsize == 1:
        question = replace(question, q_dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
    return "; ".join(dict.fromkeys((*forward, *refusals(question)))) or None


def flash_has_no_argument(params: AttentionParams) -> str | None:
    """Name arguments that flash-attn's interface has no word for."""
    biases = ("pre_scale_bias", "post_scale_bias")
    lacking = {
        "core_attention_bias": params.core_attention_bias_type in biases,
        "softmax_type": params.softmax_type != "vanilla",
        "return_max_logit": params.return_max_logit,
        "arbitrary masks": params.attn_mask_type == "arbitrary",
    }
    found = [name for name, asked in lacking.items() if asked]
    return f"flash-attn has no {', '.join(found)}" if found else None


def reads_lengths_under_capture(params: AttentionParams) -> str | None:
    if params.cuda_graph and params.varies:
        return "CUDA graphs: the definition reads lengths on the host"
    return None


_FUSED_SWITCH, _FLASH_SWITCH, _UNFUSED_SWITCH = SWITCHES
_ALWAYS = (
    has_scales_of_blocks,
    has_no_such_output,
    has_context_parallelism,
    has_score_mod,
    has_no_floats,
    packs_unlike_head_dims,
)
RULES: dict[str, tuple[Rule, ...]] = {
    "FlashAttention": (
        switched_off(_FLASH_SWITCH),
        every_flash_is_off,
        *_ALWAYS,
        flash_has_no_fp8,
        flash_has_no_argument,
        kernels_refuse,
    ),
    "FusedAttention": (
        switched_off(_FUSED_SWITCH),
        *_ALWAYS,
        kernels_refuse,
    ),
    UNFUSED: (
        switched_off(_UNFUSED_SWITCH),
        *_ALWAYS,
        reads_lengths_under_capture,
    ),
}
"""Backends in the order of `available_backends`, and the rules that may refuse each."""
