"""Backwards of FP8 calls in 8 bits: scales of dO and dS, and who computes them.

A layer's history gives the scales, or the call itself: dO's from its largest magnitude, dS's from a
bound that nothing exceeds. Nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...call.dropout import keep_scale
from ...call.fp8_checks import BACKWARD_SCALES as SCALES
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
from .gradient_casts import Given, StoredDO, stored_d_o
from .lengths import rows_in_use, rows_of_none
from .narrow import narrowed
from .registry import operator
from .torch_private import is_plain

_OF_SIDE = ("cu_seqlens_{}", "cu_seqlens_{}_padded", "seqused_{}")
# Places of the operands that say which rows of a side belong to a sequence.
_LENGTHS = {
    side: [INPUTS.index(name.format(side)) for name in _OF_SIDE]
    for side in ("q", "kv")
}
_DESCALE_V = INPUTS.index("descale_v")

library = operator("note_maxima", "(Tensor(a!) noted, Tensor found) -> ()")


def note_maxima(noted: Tensor, found: Tensor) -> None:
    """Replace magnitudes, float32 [n], by those found where these are larger.

    Autograd does not count it as a change: a backward reads what is known when it runs."""
    torch.maximum(noted.data, found, out=noted.data)


@dataclass(frozen=True, eq=False)
class FP8Call:
    """A call of FP8 operands whose backward is in 8 bits, with its results in 16 bits.

    kernels: whether these compute it, or the reference; unobserved: whether they did so in the
    forward with nothing between. operands: those of `INPUTS`; form, scale, amax: as
    `StoredGradients` has them.
    """

    kernels: bool
    unobserved: bool
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
        d_o = torch.zeros_like(self.out) if d_o is None else d_o
        _, margin, power_of_two, least, _ = self.form
        rule = CastRule(self.form.d_o_dtype, least, margin, power_of_two)
        served = self.unobserved and (dlse is None or is_plain(dlse))
        stored = self._by_kernels(d_o, dlse, rule) if served else None
        if stored is None:
            found = self._as_defined(wanted, d_o, dlse, rule)
        else:
            found = self._run_noting(wanted, stored, dlse)
        for name in LEARNED:
            of = self.operands[INPUTS.index(name)]
            if of is not None:
                found[GRADIENT_OF[name]] = found[GRADIENT_OF[name]].to(of.dtype)
        return found

    def _by_kernels(self, d_o: Tensor, dlse: Tensor | None, rule: CastRule) -> StoredDO | None:
        """dO in 8 bits and the scale of dS by kernels, which note dO's magnitude; None where these
        do not serve the call. Raises: CompileError, LaunchError."""
        v, axes = self._carrier_of_v()
        given = Given(
            d_o=d_o,
            v=v,
            used_0=self._rows([*layout_of(self.arguments.layout).q_format], "q", d_o),
            used_v=self._rows(axes, "kv", v),
            descale_v=self.operands[_DESCALE_V],
            of_lse=None if dlse is None else self._largest_of_lse(dlse),
            known=self.scale,
            noted=self.amax,
        )
        return stored_d_o(given, rule, *self._factors())

    def _run_noting(
        self, wanted: WantedGradients, stored: StoredDO, dlse: Tensor | None
    ) -> dict[str, Tensor]:
        """Gradients by kernels, which note the magnitude of dS. Raises: SpecError, CompileError,
        LaunchError."""
        there = dict.fromkeys(("d_o", "o", "lse", *INPUTS, "dlse", *SCALES))
        there.update(zip(INPUTS, self.operands, strict=True))
        there |= {"d_o": stored.d_o, "o": self.out, "lse": self.lse, "dlse": dlse}
        there |= {"descale_do": stored.descale, "scale_dp": stored.scale_dp}
        there["descale_dp"] = stored.descale_dp
        if self.amax is not None:
            there["amax_dp"] = self.amax.data[1:]
        arguments = _of_results(self.arguments, name_of(self.out.dtype), False)
        return fp8_backward.differentiate(arguments, wanted, there, mixed=self.form.mixed)

    def _as_defined(
        self, wanted: WantedGradients, d_o: Tensor, dlse: Tensor | None, rule: CastRule
    ) -> dict[str, Tensor]:
        """Gradients by operations of torch, and theirs by that of the kernels or the reference."""
        rows = self._rows([*layout_of(self.arguments.layout).q_format], "q", d_o)
        known = None if self.scale is None else self.scale[:1]
        (d_o8,), numbers, _ = narrowed([d_o], [rows], rule, known)
        amax, _, descale = numbers[:, 0].unbind()
        scale_dp = self._own_scale_dp(amax, dlse, d_o8.dtype)
        if self.scale is not None:
            known = self.scale[1:]
            scale_dp = torch.where(known > 0, known, scale_dp)
        scales = dict.fromkeys(SCALES) | {
            "descale_do": descale,
            "scale_dp": scale_dp,
            "descale_dp": scale_dp.reciprocal(),
        }
        found = self._run(wanted, d_o8, dlse, scales)
        if self.amax is not None:
            torch.ops.attngen.note_maxima(self.amax, torch.cat([amax, found["amax_dp"]]))
        return found

    def _run(
        self,
        wanted: WantedGradients,
        d_o: Tensor,
        dlse: Tensor | None,
        scales: dict[str, Tensor | None],
    ) -> dict[str, Tensor]:
        """Gradients and maxima by their names."""
        notes, dtype = self.amax is not None, name_of(self.out.dtype)
        arguments = _of_results(self.arguments, dtype, notes)
        rows, numbers = (self.out, self.lse), tuple(scales.values())
        if self.kernels:
            found = fp8_backward.dispatched(
                *(d_o, dlse, *self.operands[:3], *rows, *self.operands[3:], *arguments),
                *(*numbers, *wanted, self.form.mixed),
            )
        else:
            found = reference_fp8.dispatched(
                *(d_o, dlse, *rows, *numbers, *self.operands, *arguments, *wanted, self.form.mixed)
            )
        return dict(zip((*GRADIENT_OF.values(), *MAXIMA), found, strict=True))

    def _own_scale_dp(self, amax: Tensor, dlse: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The largest power of two with which no dS can saturate, float32 [1], by the largest
        magnitudes of dO and V."""
        of_products, of_softmax = self._factors()
        bound = amax * self._largest_of_v() * of_products
        if dlse is not None:
            bound = bound + self._largest_of_lse(dlse)
        return power_of_two(torch.finfo(dtype).max / (bound * of_softmax))

    def _factors(self) -> tuple[float, float]:
        """By what the product of the largest magnitudes of dO and V bounds dP, and that dS."""
        arguments, (q, *_) = self.arguments, self.operands
        assert q is not None  # the operation's schema
        scale = arguments.softmax_scale
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        keep = keep_scale(arguments.dropout_p) if arguments.dropout_p > 0 else 1.0
        return DS_BOUND * self.out.shape[-1] * keep, abs(scale)

    def _largest_of_lse(self, dlse: Tensor) -> Tensor:
        """The largest magnitude of the LSE's gradient, float32 [1]."""
        unused = rows_of_none(self.lse, dict(zip(INPUTS, self.operands, strict=True)))
        # Of rows that see no key it may be NaN, where two of them were joined, and counts not.
        rows = self.lse != -math.inf
        return largest(dlse, rows if unused is None else rows & ~unused)

    def _carrier_of_v(self) -> tuple[Tensor, list[str]]:
        """The tensor that holds V, and its axes."""
        place, axes = _home_of_v(self.arguments.layout)
        v = self.operands[place]
        assert v is not None  # the layout has it
        return v, axes

    def _largest_of_v(self) -> Tensor:
        """The largest magnitude of V, and of what is packed with it, float32 [1]."""
        v, axes = self._carrier_of_v()
        # Magnitudes are in the order of their bits.
        sizes = v.view(torch.uint8).bitwise_and(0x7F)
        rows = self._rows(axes, "kv", v)
        if rows is not None:
            sizes = torch.where(rows, sizes, 0)
        found = torch.zeros(1, dtype=torch.uint8, device=v.device)
        if v.numel():
            found = sizes.amax().reshape(1)
        amax = found.view(v.dtype).float()
        descale = self.operands[_DESCALE_V]
        return amax if descale is None else amax * descale.amax()

    def _rows(self, axes: list[str], side: str, x: Tensor) -> Tensor | None:
        """Which rows of a tensor of these axes belong to a sequence, a broadcast of it; None where
        all do. side: q or kv, by whose lengths."""
        lengths = [self.operands[place] for place in _LENGTHS[side]]
        if all([each is None for each in lengths]):
            return None
        return rows_in_use(Lengths(*lengths), axes, x)


@lru_cache
def _home_of_v(layout: str) -> tuple[int, list[str]]:
    """The place of the operand that holds V, and its axes."""
    parsed = layout_of(layout)
    carrier, _, _ = parsed.home("v")
    return INPUTS.index(carrier), axes_of(parsed, carrier)


@lru_cache
def _of_results(arguments: Arguments, out_dtype: str, amax: bool) -> Arguments:
    """Arguments for gradients of a dtype, with or without maxima."""
    return arguments._replace(out_dtype=out_dtype, amax=amax)


library.impl("note_maxima", note_maxima, "CompositeExplicitAutograd")
torch.library.register_fake("attngen::note_maxima", lambda noted, found: None, lib=library)
