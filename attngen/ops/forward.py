"""The operation `attngen::forward`: dense 16-bit attention through compiled kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..reference.fp8 import is_fp8
from ..reference.fp8_checks import dtype_violations
from .operands import outputs, scalars_of
from .operation import Operands, Operation, Output, Ready, find_ready, library, prepare_forward, run

library.define(
    "forward(Tensor q, Tensor k, Tensor v, str layout, str mask, float softmax_scale, "
    "int window_left, int window_right, bool bottom_right, bool partial) -> (Tensor, Tensor)"
)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: str,
    mask: str,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    bottom_right: bool,
    partial: bool,
) -> tuple[Tensor, Tensor]:
    """Attention of dense tensors: output and log-sum-exp.

    q [b, s_q, h_q, d], k [b, s_kv, h_kv, d], v [b, s_kv, h_kv, d_v] in the axis order of
    `layout` (`bshd`, `sbhd` or `bhsd`), float16 or bfloat16, one CUDA device, last axis
    contiguous, other strides and addresses multiples of 16 bytes. Window sides in keys, −1
    unbounded. Returns the output in Q's axis order and dtype (float32 where `partial`), and the
    LSE, natural log, float32 [b, h_q, s_q].
    Raises: SpecError with every violation; LaunchError.
    """
    arguments = (layout, mask, softmax_scale, window_left, window_right, bottom_right, partial)
    out, lse = run(find_ready(FORWARD, (q, k, v), arguments), (q, k, v))
    return out, lse


def _make_ready(operands: Operands, arguments: tuple[Any, ...]) -> Ready:
    q, k, v = operands
    assert q is not None and k is not None and v is not None  # the operation's schema
    layout, mask, *scalars, partial = arguments
    out, lse = outputs(q, v, layout, torch.float32 if partial else q.dtype)
    reasons = [*dtype_violations(q.dtype, k.dtype, v.dtype)]
    if is_fp8(q.dtype):
        reasons.append(f"q is {q.dtype}; attngen::forward_fp8 takes 8 bits")
    prepared = prepare_forward(
        {"q": q, "k": k, "v": v, "o": out},
        layout,
        scalars_of(*scalars),
        reasons,
        mask=mask,
        out_dtype="fp32" if partial else None,
    )
    results = (Output.like("o", out, 0.0), Output.like("lse", lse, -math.inf))
    return Ready(("q", "k", "v"), results, (), q.device, prepared)


def _call(operands: Operands, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    results: tuple[Tensor, ...] = torch.ops.attngen.forward(*operands, *arguments)
    return results


FORWARD = Operation(_call, _make_ready)


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: str,
    mask: str,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    bottom_right: bool,
    partial: bool,
) -> tuple[Tensor, Tensor]:
    return outputs(q, v, layout, torch.float32 if partial else q.dtype)


library.impl("forward", forward, "CUDA")
torch.library.register_fake("attngen::forward", _fake_forward, lib=library)
