"""`attngen.attention`: one call for every variant, on the kernels or on the reference."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from .. import features, reference
from ..errors import SpecError
from ..reference.call import MaskMod, ScoreMod, Window
from ..resolve import find_violations, split_mask
from ..results import AttentionAux
from ..spec import AttentionSpec
from .forward import ARCH_OF_CAPABILITY, device_arch

log = logging.getLogger("attngen")

BACKENDS = ("auto", "cuda", "reference")
_LENGTHS = (
    *("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
    *("seqused_q", "seqused_kv", "page_table", "rng_state", "num_splits"),
)


def attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    layout: str = "bshd",
    mask: str = "none",
    window: Window = (-1, -1),
    bottom_right: bool | None = None,
    attn_mask: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    bias_type: str = "post_scale",
    alibi_slopes: Tensor | bool | None = None,
    softmax: str = "vanilla",
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_kv: Tensor | None = None,
    page_table: Tensor | tuple[Tensor, Tensor] | None = None,
    num_splits: int | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: Any = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, AttentionAux]:
    """Scaled dot-product attention with any of attngen's masks, scores, softmaxes and layouts.

    q, k, v: tensors in `layout`, by default [b, s_q, h_q, d], [b, s_kv, h_kv, d] and
    [b, s_kv, h_kv, d_v]; h_q a multiple of h_kv. window: keys visible before and after the
    diagonal, −1 unbounded. softmax_scale defaults to 1/√d. What each argument means is in
    docs/semantics.md.

    backend: `cuda` runs a compiled kernel or refuses; `reference` is the definition in plain
    PyTorch, on any device; `auto` takes a kernel where there is one and else the reference, and
    logs the reason once.

    Returns the output in Q's format and dtype, or (output, AttentionAux) where `return_lse`,
    `return_max_logit` or dropout asks for by-products.
    Raises: SpecError with every violation at once; CompileError, LaunchError.
    """
    arguments = dict(locals())
    for name in ("q", "k", "v", "backend", "num_splits", "deterministic"):
        del arguments[name]
    if backend not in BACKENDS:
        raise SpecError(f"backend={backend!r}; allowed: {', '.join(BACKENDS)}")
    wants_aux = return_lse or return_max_logit or dropout_p > 0
    if backend != "reference":
        reasons = _refusals(q, k, v, arguments, num_splits, deterministic)
        if not reasons:
            assert k is not None and v is not None  # a layout that packs them was refused
            _refuse_gradient(q, k, v)
            _, aligned = split_mask(mask)
            left, right = (-1 if side is None else side for side in window)
            scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
            out, lse = torch.ops.attngen.forward(
                *(q, k, v, layout, mask, scale, left, right),
                aligned if bottom_right is None else bottom_right,
                False,
            )
            return (out, AttentionAux(lse=lse)) if wants_aux else out
        if backend == "cuda":
            raise SpecError(reasons)
        _log_once("; ".join(reasons))
    out, aux = reference.attention(q, k, v, **arguments)
    return (out, aux) if wants_aux else out


def _refusals(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    arguments: dict[str, Any],
    num_splits: int | None,
    deterministic: bool | None,
) -> list[str]:
    """Why no kernel can serve this call; empty where one can."""
    if device_arch(q.device) is None:
        return [f"{q.device} has no kernels; available: {', '.join(ARCH_OF_CAPABILITY.values())}"]
    spec = AttentionSpec.from_call(q, k, v, **arguments, deterministic=deterministic)
    reasons = [violation.reason for violation in find_violations(spec, features.scan())]
    given = {**arguments, "num_splits": num_splits}
    reasons += [f"{name} has no kernels yet" for name in _LENGTHS if given[name] is not None]
    return reasons


def _refuse_gradient(*tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise SpecError(
            "a gradient is needed, but the kernels have no backward yet: call under "
            "torch.no_grad(), detach q, k and v, or pass backend='reference'"
        )


_logged: set[str] = set()


def _log_once(reason: str) -> None:
    if not torch.compiler.is_compiling() and reason not in _logged:
        _logged.add(reason)
        log.warning("attention runs on the reference backend: %s", reason)
