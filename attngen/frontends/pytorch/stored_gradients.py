"""Backwards of FP8 calls in 8 bits: scales of dO and dS, and who computes them.

A layer's history gives the scales, or the call itself: dO's from its largest magnitude, dS's from a
bound that nothing exceeds. Nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...call.dropout import keep_scale
from ...call.fp8_checks import BACKWARD_SCALES
from ...call.fp8_gradients import MAXIMA
from ...call.fp8_scales import DS_BOUND
from ...call.numbers import Arguments
from ...call.operands import layout_of
from ...call.recipe import CastRule, GradientForm
from ...call.table import GRADIENT_OF, INPUTS, LEARNED, Lengths, WantedGradients
from ...call.tensors import name_of
from ...reference.fp8_backward import power_of_two
from ...reference.fp8_scales import largest
from ...spec.layouts import axes_of
from . import fp8_backward, reference_fp8
from .lengths import rows_in_use, rows_of_none
from .narrow import narrowed
from .registry import operator
from .signature import dtype_of

library = operator("note_maxima", "(Tensor(a!) noted, Tensor found) -> ()")


def note_maxima(noted: Tensor, found: Tensor) -> None:
    """Replace magnitudes, float32 [n], by those found where these are larger.

    Autograd does not count it as a change: a backward reads what is known when it runs."""
    torch.maximum(noted.data, found, out=noted.data)


@dataclass(frozen=True, eq=False)
class FP8Call:
    """A call of FP8 operands whose backward is in 8 bits, with its results in 16 bits.

    kernels: whether these compute it, or the reference; operands: those of `INPUTS`; form, scale,
    amax: as `StoredGradients` has them.
    """

    kernels: bool
    form: GradientForm
    scale: Tensor | None
    amax: Tensor | None
    out: Tensor
    lse: Tensor
    operands: Sequence[Tensor | None]
    arguments: Arguments

    def differentiate(
        self, wanted: WantedGradients, d_o: Tensor | None, dlse: Tensor | None
    ) -> dict[str, Tensor]:
        """The gradients that are wanted, by their names, in the dtype of the output; those of
        biases in theirs. Raises: SpecError with every violation; CompileError, LaunchError."""
        dtype = dtype_of(self.form.d_o_dtype)
        d_o = torch.zeros_like(self.out) if d_o is None else d_o
        q_format = layout_of(self.arguments.layout).q_format
        rows = self._rows([*q_format], "q", d_o)
        _, margin, power_of_two, least = self.form
        rule = CastRule(self.form.d_o_dtype, least, margin, power_of_two)
        known = None if self.scale is None else self.scale[:1]
        (d_o8,), (amax,), _, (descale,) = narrowed([d_o], [rows], rule, known)
        scale_dp = self._own_scale_dp(amax, dlse, dtype)
        if self.scale is not None:
            known = self.scale[1:]
            scale_dp = torch.where(known > 0, known, scale_dp)
        scales = dict.fromkeys(BACKWARD_SCALES) | {
            "descale_do": descale,
            "scale_dp": scale_dp,
            "descale_dp": scale_dp.reciprocal(),
        }
        found = self._run(wanted, d_o8, dlse, scales)
        if self.amax is not None:
            torch.ops.attngen.note_maxima(self.amax, torch.cat([amax, found["amax_dp"]]))
        for name in LEARNED:
            of = self.operands[INPUTS.index(name)]
            if of is not None:
                found[GRADIENT_OF[name]] = found[GRADIENT_OF[name]].to(of.dtype)
        return found

    def _run(
        self,
        wanted: WantedGradients,
        d_o: Tensor,
        dlse: Tensor | None,
        scales: dict[str, Tensor | None],
    ) -> dict[str, Tensor]:
        """Gradients and maxima by their names."""
        arguments = self.arguments._replace(
            out_dtype=name_of(self.out.dtype), amax=self.amax is not None
        )
        rows, numbers = (self.out, self.lse), tuple(scales.values())
        if self.kernels:
            found = fp8_backward.dispatched(
                *(d_o, dlse, *self.operands[:3], *rows, *self.operands[3:], *arguments),
                *(*numbers, *wanted),
            )
        else:
            found = reference_fp8.dispatched(
                *(d_o, dlse, *rows, *numbers, *self.operands, *arguments, *wanted)
            )
        return dict(zip((*GRADIENT_OF.values(), *MAXIMA), found, strict=True))

    def _own_scale_dp(self, amax: Tensor, dlse: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The largest power of two with which no dS can saturate, float32 [1], by the largest
        magnitudes of dO and V."""
        arguments, (q, *_) = self.arguments, self.operands
        assert q is not None  # the operation's schema
        scale = arguments.softmax_scale
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        keep = keep_scale(arguments.dropout_p) if arguments.dropout_p > 0 else 1.0
        bound = amax * self._largest_of_v() * (DS_BOUND * self.out.shape[-1] * keep)
        if dlse is not None:
            lengths = dict(zip(INPUTS, self.operands, strict=True))
            unused = rows_of_none(self.lse, lengths)
            # Of rows that see no key it may be NaN, where two of them were joined, and counts not.
            rows = self.lse != -math.inf
            bound = bound + largest(dlse, rows if unused is None else rows & ~unused)
        return power_of_two(torch.finfo(dtype).max / (bound * abs(scale)))

    def _largest_of_v(self) -> Tensor:
        """The largest magnitude of V, and of what is packed with it, float32 [1]."""
        layout = layout_of(self.arguments.layout)
        carrier, _, _ = layout.home("v")
        v = self.operands[INPUTS.index(carrier)]
        assert v is not None  # the layout has it
        # Magnitudes are in the order of their bits.
        sizes = v.view(torch.uint8).bitwise_and(0x7F)
        rows = self._rows(axes_of(layout, carrier), "kv", v)
        if rows is not None:
            sizes = torch.where(rows, sizes, 0)
        found = torch.zeros(1, dtype=torch.uint8, device=v.device)
        if v.numel():
            found = sizes.amax().reshape(1)
        amax = found.view(v.dtype).float()
        descale = self.operands[INPUTS.index("descale_v")]
        return amax if descale is None else amax * descale.amax()

    def _rows(self, axes: list[str], side: str, x: Tensor) -> Tensor | None:
        """Which rows of a tensor of these axes belong to a sequence, a broadcast of it; None where
        all do. side: q or kv, by whose lengths."""
        named = dict(zip(INPUTS, self.operands, strict=True))
        names = (f"cu_seqlens_{side}", f"cu_seqlens_{side}_padded", f"seqused_{side}")
        return rows_in_use(Lengths(*[named[name] for name in names]), axes, x)


library.impl("note_maxima", note_maxima, "CompositeExplicitAutograd")
torch.library.register_fake("attngen::note_maxima", lambda noted, found: None, lib=library)
