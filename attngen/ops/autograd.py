"""Autograd of `attngen::forward`, whose gradients are `attngen::backward`'s."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .backward import GRADIENTS
from .signature import split


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keeps what the gradients need."""
    q, k, v, *rest = inputs
    optional, arguments = split(rest)
    out, lse, *maxima = output
    ctx.save_for_backward(q, k, v, out, lse, *optional)
    ctx.arguments = arguments
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*maxima)


def gradients(
    ctx: Any, d_o: Tensor | None, dlse: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Those of the operation's arguments, from those of its output and LSE."""
    wanted = ctx.needs_input_grad
    returned: tuple[Tensor | None, ...] = (None,) * len(GRADIENTS)
    if d_o is not None or dlse is not None:
        q, k, v, out, lse, *optional = ctx.saved_tensors
        d_o = torch.zeros_like(out) if d_o is None else d_o
        found = torch.ops.attngen.backward(
            *(d_o, dlse, q, k, v, out, lse, *optional, *ctx.arguments),
            want_dq=wanted[0],
            want_dkv=wanted[1] or wanted[2] or (k is None and wanted[0]),
        )
        returned = tuple(x if want else None for x, want in zip(found, wanted, strict=False))
    return (*returned, *(None,) * (len(wanted) - len(returned)))
