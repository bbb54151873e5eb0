"""transformers' models on attngen's kernels: `register`, and the functions that it registers."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import attention
from ...errors import SpecError
from . import left_padded
from .mask_plan import PlannedMask, Request, plan_of
from .paged import (
    PAGES,
    attend_cache,
    attend_packed,
    attend_pages,
    has_packed_tokens,
    is_batched,
    leave_in_place,
)

__all__ = ["attend", "mask_of", "register"]
Mask = PlannedMask | Tensor | None
PAGED, SDPA = "paged|", "sdpa"
log = logging.getLogger("attngen")
_said: set[str] = set()


def register(name: str = "attngen", backend: str = "auto") -> str:
    """Let models be loaded with `attn_implementation=name`, and return the name.

    Continuous batching (`generate_batch`) calls it by a second name, `paged|name`; from
    transformers 5.23 on, which batches with no attention but its own, by `register("sdpa")`.

    backend: as of `attngen.attention`, for all calls of these models.

    Raises: ImportError where transformers is not installed, or has no AttentionMaskInterface.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    if name == SDPA and f"{PAGED}{SDPA}" not in AttentionInterface().valid_keys():
        leave_in_place(_is_ours)
    AttentionMaskInterface.register(name, mask_of)
    for each in (name, f"{PAGED}{name}"):  # which has lengths, and no masks
        AttentionInterface.register(each, partial(attend, backend=backend))
    return name


def _is_ours(name: str) -> bool:
    """Whether transformers has one of these functions as the attention of that name."""
    from transformers import AttentionInterface

    return getattr(AttentionInterface().get(name), "func", None) is attend


def mask_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Any = None,
    **rest: Any,
) -> Mask:
    """The mask that transformers asks for, as arguments of attention where its function is built of
    causal masks, windows, chunks, documents and padding; else the tensor [b, 1, q, kv], as while
    torch.compile traces. A mask that has been planned before stays as it is."""
    if isinstance(attention_mask, PlannedMask):
        return attention_mask
    sizes = batch_size, q_length, kv_length, q_offset, kv_offset
    device = rest.pop("device", "cpu")
    request = Request(*sizes, mask_function, attention_mask, device, rest)
    if torch.compiler.is_compiling():
        return request.dense()
    return plan_of(request) or request.dense()


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Mask, **given: Any
) -> tuple[Tensor, None]:
    """Attention as transformers' models call it.

    query: [b, h, s_q, d]; key, value: [b, h_kv, s_kv, d and d_v]; attention_mask: of `mask_of`, a
    tensor, bool or added to the scores, or None. given: scaling, dropout, softcap, s_aux (a sink of
    each head), position_bias [1 or b, h, s_q, s_kv], is_causal and sliding_window, which count only
    where there is no mask; others are of other implementations.

    Returns: the output [b, s_q, h, d_v], and None for weights, which nobody keeps.

    Raises: SpecError where a mask is of other lengths, and as `attngen.attention`.
    """
    arguments: dict[str, Any] = {
        "softmax_scale": given.get("scaling"),
        "softcap": given.get("softcap"),
        "backend": given.get("backend", "auto"),
    }
    if (sink := given.get("s_aux")) is not None:
        arguments |= {"softmax": "learnable", "sink": sink}
    if p := given.get("dropout", 0.0):
        arguments |= {"dropout_p": p, "return_rng_state": True}
    if (bias := given.get("position_bias")) is not None:
        arguments["bias"] = bias
    if given.get("output_attentions"):
        _say_no_weights()
    if has_packed_tokens(given) and (attention_mask is None or is_batched(given)):
        if (pages := given.get(PAGES)) is not None:
            found = attend_pages(module, query, pages, arguments, given)
        else:
            run = attend_cache if given.get("cache") is not None else attend_packed
            found = run(module, (query, key, value), arguments, given)
        return _output(found).unflatten(0, (query.shape[0], -1)), None
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    ends = None
    if isinstance(attention_mask, PlannedMask):
        ends = attention_mask.ends
        arguments |= _planned(attention_mask, k.shape[1], bias is not None)
    elif attention_mask is not None:
        arguments |= _by_tensor(attention_mask, bias)
    else:
        arguments |= _without_mask(module, q.shape[1], k.shape[1], given)
    if ends is None or "attn_mask" in arguments:
        if arguments.get("seqstart_kv") is not None:
            plan: Any = attention_mask  # which alone says so
            kept = None if torch.compiler.is_compiling() else plan.lengths
            found = left_padded.attend((query, key, value), arguments, kept)
            return _output(found), None
        return _output(attention(q, k, v, layout="bshd", **arguments)), None
    rows = q.shape[:2]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    arguments |= {"layout": "thd", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    return _output(attention(q, k, v, **arguments)).unflatten(0, rows), None


def _say_no_weights() -> None:
    if not torch.compiler.is_compiling() and "weights" not in _said:
        _said.add("weights")
        log.warning(
            "output_attentions: kernels keep no weights, so a model's attentions are empty; load "
            "it with attn_implementation='eager' for these"
        )


def _output(found: Any) -> Tensor:
    """The output of a call that may have by-products."""
    out: Tensor
    out, *_ = found if isinstance(found, tuple) else (found,)
    return out


def _planned(plan: PlannedMask, keys: int, has_bias: bool) -> dict[str, Any]:
    """The arguments of a plan; the mask itself beside a bias, whose rows are the tensors', where
    the plan has others, and for functions while torch.compile traces, which are no kernels' there.

    Raises: SpecError where it is of another number of keys.
    """
    *_, planned = plan.shape
    if planned != keys:
        raise SpecError(f"a mask of {planned} keys came to a layer of {keys}")
    others = plan.ends is not None or plan.arguments.get("seqstart_kv") is not None
    traced = "mask_mod" in plan.arguments and torch.compiler.is_compiling()
    if traced or (has_bias and others):
        return {"attn_mask": plan.request.dense()}
    return plan.arguments


def _by_tensor(mask: Tensor, bias: Tensor | None) -> dict[str, Any]:
    """The arguments of a mask that is a tensor, beside a bias or none."""
    if mask.dtype == torch.bool:
        return {"attn_mask": mask}
    return {"bias": mask if bias is None else mask + bias}


def _without_mask(module: Any, s_q: int, s_kv: int, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a layer that got no mask: causal where it says so and has more than one
    query, the first of which sees the first key."""
    causal = given.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    window = given.get("sliding_window")
    arguments: dict[str, Any] = {"mask": "causal"} if causal and s_q > 1 else {}
    if window is not None and causal and s_q == s_kv:
        arguments["window"] = (window - 1, 0)
    return arguments
