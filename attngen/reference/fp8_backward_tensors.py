"""Tensors that an FP8 backward takes beside those of its forward, and those that it gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class BackwardOperands:
    """Tensors that an FP8 backward takes beside those of its forward.

    d_o: gradient of the output, FP8 in Q's format with V's head dim, or in 16 bits and more. o,
    lse: results of the forward, o in FP8, with its descale_o, or wider. dlse: gradient of the LSE,
    of its shape. Scales: float32 [1] on the device of q, None for 1; without scale_dp and
    descale_dp the definition chooses them. scale_dq, scale_dk and scale_dv are for gradients in
    FP8. dtype: the gradients', bfloat16 by default. mixed: whether P and dS are stored in bfloat16,
    whatever the dtype of d_o.
    """

    d_o: Tensor
    o: Tensor
    lse: Tensor
    dlse: Tensor | None = None
    descale_o: Tensor | None = None
    descale_do: Tensor | None = None
    scale_dp: Tensor | None = None
    descale_dp: Tensor | None = None
    scale_dq: Tensor | None = None
    scale_dk: Tensor | None = None
    scale_dv: Tensor | None = None
    dtype: torch.dtype = torch.bfloat16
    mixed: bool = False


@dataclass(frozen=True, eq=False)
class Fp8Gradients:
    """Results of an FP8 backward.

    dq, dk, dv: in the shapes of q, k and v, packed as they are, None where one is packed into
    another. learned: those of other operands that the call has, by their names, such as dbias, in
    the operands' shapes, float32 or what was accumulated in. Maxima, float32 [1]: amax_dp of |dS|
    with the softmax scale, the others of |dQ|, |dK| and |dV|, each before its scale and 0 where
    nothing is visible.
    """

    dq: Tensor
    dk: Tensor | None
    dv: Tensor | None
    learned: dict[str, Tensor]
    amax_dp: Tensor
    amax_dq: Tensor
    amax_dk: Tensor
    amax_dv: Tensor

    @property
    def by_name(self) -> dict[str, Tensor]:
        """The gradients that there are, dq, dk, dv and the learned ones."""
        carried = {"dq": self.dq, "dk": self.dk, "dv": self.dv}
        return {name: x for name, x in carried.items() if x is not None} | self.learned
