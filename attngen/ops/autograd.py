"""Autograd of `attngen::forward`, whose gradients are `attngen::backward`'s."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import SpecError
from . import backward  # noqa: F401  # defines the operation
from .signature import INPUTS, split

# Whose gradients `attngen::backward` returns, in order.
DIFFERENTIABLE = ("q", "k", "v", "sink", "bias")


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keeps what the gradients need. Raises: SpecError where one is needed that there is not."""
    for name, wanted in zip(INPUTS, ctx.needs_input_grad, strict=False):
        if wanted and name not in DIFFERENTIABLE:
            raise SpecError(f"{name} has no gradient: detach it, or pass backend='reference'")
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
    given = ctx.needs_input_grad  # the dispatcher left out what equals its default at the end
    wanted = (*given, *(False for _ in INPUTS))
    returned: list[Tensor | None] = [None] * len(given)
    if d_o is not None or dlse is not None:
        q, k, v, out, lse, *optional = ctx.saved_tensors
        d_o = torch.zeros_like(out) if d_o is None else d_o
        found = torch.ops.attngen.backward(
            *(d_o, dlse, q, k, v, out, lse, *optional, *ctx.arguments),
            want_dq=wanted[0],
            want_dkv=wanted[1] or wanted[2] or (k is None and wanted[0]),
            want_dsink=wanted[INPUTS.index("sink")],
            want_dbias=wanted[INPUTS.index("bias")],
        )
        for name, gradient in zip(DIFFERENTIABLE, found, strict=True):
            place = INPUTS.index(name)
            if wanted[place]:
                returned[place] = gradient
    return tuple(returned)
