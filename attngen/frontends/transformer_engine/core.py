"""Core attention: what modules and backends share, from TransformerEngine's words to a call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import attention
from ...spec.layouts import parse
from .masks import Masks, seqused_of
from .variants import BIAS_TYPES, SideLengths, Tensors, lengths_of, variant_of

Output = Tensor | tuple[Tensor, Tensor]


class Carriers(NamedTuple):
    """Tensors of a call as its layout has them: K and V are None where they are packed."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None


@dataclass(frozen=True)
class Words:
    """A call but for its tensors, in TransformerEngine's words, its mask and window as they are to
    be."""

    layout: str
    mask: str
    window: tuple[int, int]
    bottom_right: bool
    softmax: str
    bias: str
    softmax_scale: float | None
    dropout: float


@dataclass(frozen=True, eq=False)
class Extras:
    """Tensors beside Q, K and V that a call may have: what hides, what is added to scores, sinks,
    [1, h, 1, 1] or [h], and the pages of K and V."""

    attention_mask: Masks = None
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    offset: Tensor | None = None
    page_table: Tensor | None = None


@dataclass(frozen=True)
class How:
    """How a call is computed: on which of attngen's backends, in what context dropout draws, and
    whether gradients have the same bits on every run (None asks PyTorch); and whether the largest
    logits are wanted."""

    backend: str = "auto"
    context: Callable[[], Any] = nullcontext
    deterministic: bool | None = None
    max_logit: bool = False
    num_splits: int | None = None


def attend(carriers: Carriers, words: Words, lengths: Tensors, extras: Extras, how: How) -> Output:
    """The output […, h · d_v], or that and the largest logits [h]; with gradients.

    lengths: as attngen's operations take them. Raises: as `attngen.attention` does.
    """
    given: dict[str, Any] = {**_arguments_of(words), **lengths}
    if words.mask == "arbitrary":
        mask = extras.attention_mask
        assert isinstance(mask, Tensor), "an arbitrary mask needs attention_mask, a tensor"
        given["attn_mask"] = mask.logical_not()
    if words.bias in BIAS_TYPES:
        given["bias"] = extras.bias
    elif words.bias == "alibi":
        given["alibi_slopes"] = True if extras.alibi_slopes is None else extras.alibi_slopes
    if words.softmax != "vanilla":
        assert extras.offset is not None, "softmax_type needs softmax_offset"
        given["sink"] = extras.offset.reshape(-1).float()
    if extras.page_table is not None:
        given["page_table"] = extras.page_table
    if how.backend != "auto":
        given["backend"] = how.backend
    if how.deterministic is not None:
        given["deterministic"] = how.deterministic
    if how.num_splits is not None:
        given["num_splits"] = how.num_splits
    q, k, v = carriers
    if not words.dropout and not how.max_logit:
        plain: Tensor = attention(q, k, v, **given)
        return plain.flatten(-2)
    with how.context() if words.dropout else nullcontext():
        out, aux = attention(
            q, k, v, **given, return_rng_state=True, return_max_logit=how.max_logit
        )
    flat: Tensor = out.flatten(-2)
    return (flat, aux.max_logit.to(out.dtype)) if how.max_logit else flat


def _translated(words: Words) -> dict[str, Any]:
    variant = variant_of(
        words.layout, words.mask, words.window, words.bottom_right, words.softmax, words.bias
    )
    given = variant.for_attention() | {
        "softmax_scale": words.softmax_scale,
        "dropout_p": words.dropout,
    }
    slanted = "causal" in words.mask or variant.window != (-1, -1) or words.bias == "alibi"
    given["bottom_right"] = bool(words.bottom_right and slanted)
    return {name: x for name, x in given.items() if x != _PLAIN.get(name)}  # which costs a call


_PLAIN = {
    "layout": "bshd_bshd_bshd",
    "mask": "none",
    "window": (-1, -1),
    "bottom_right": False,
    "softmax": "vanilla",
    "bias_type": "post_scale",
    "dropout_p": 0.0,
}
_remembered = lru_cache(maxsize=4096)(_translated)


def _arguments_of(words: Words) -> dict[str, Any]:
    return _translated(words) if torch.compiler.is_compiling() else _remembered(words)


def lengths_of_call(
    layout: str,
    mask: str,
    batch: int | None,
    sides: tuple[SideLengths, SideLengths],
    masks: Masks,
) -> Tensors:
    """The lengths that a layout and a mask need, of cumulative ones, which come first, or of
    padding masks. batch: sequences of dense formats. Raises: SpecError where there are none."""
    parsed = parse(layout)
    padding, (q, kv) = "padding" in mask, sides
    dense = "thd" not in parsed.formats and not parsed.paged
    if padding and dense and (q.cu_seqlens is None or kv.cu_seqlens is None):
        of_q, of_kv = seqused_of(masks)
        return {"seqused_q": of_q, "seqused_kv": of_q if parsed.one_length else of_kv}
    return lengths_of(layout, padding, batch, q, kv)
