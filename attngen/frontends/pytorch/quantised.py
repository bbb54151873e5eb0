"""The operation `attngen::quantised`: an FP8 forward whose gradients have 16 bits.

Its operands are in FP8; the tensors that they were made of, if any, come along for their gradients
alone, which pass the rounding to 8 bits straight through. The backward is that of 16 bits, of the
numbers that the stored ones stand for, or one in 8 bits; with the output and the LSE of the
forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from ...call.gradient_kernels import wanted_of_operands
from ...call.numbers import Arguments
from ...call.operands import layout_of
from ...call.prepared import PreparedCall
from ...call.recipe import GradientForm, StoredGradients
from ...call.table import CARRIERS, GRADIENT_OF, INPUTS, LEARNED, SCALES, WantedGradients
from ...spec.call_arguments import TOKEN_AXES
from ...spec.layouts import Layout, axes_of
from . import reference_fp8
from .autograd import is_looked_at, refuse_gradient
from .backward import differentiate, dispatch
from .forward import find_prepared, with_readable_bias
from .forward import forward as by_kernels
from .operation import run
from .registry import operator
from .signature import CallForm, Operands, places_of, schema
from .stored_gradients import FP8Call
from .token_scales import by_rows
from .torch_private import apply_of
from .transforms import differentiable, refuse_tangents

_BIAS = INPUTS.index("bias")
_OF_LAYER = ("gradient_scale", "gradient_amax")
# What stands before the carriers, and before `INPUTS`.
_FIRST_CARRIER = 1 + len(GradientForm._fields) + len(_OF_LAYER)
_FIRST_OPERAND = _FIRST_CARRIER + len(CARRIERS)

library = operator(
    "quantised",
    "(bool kernels, str d_o_dtype, int margin, bool power_of_two, float amax_epsilon, "
    f"bool mixed, {', '.join(f'Tensor? {name}' for name in _OF_LAYER)}, "
    "Tensor? q16, Tensor? k16, Tensor? v16, Tensor q, Tensor? k, Tensor? v, "
    f"{schema()}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@torch.no_grad()
def forward(kernels: bool, *given: Any) -> tuple[Tensor, ...]:
    """The results of `attngen::forward` for operands in FP8.

    kernels: whether these compute it, or the reference. given: what is read of by the backward
    alone, a `GradientForm`, scales and magnitudes of a layer, and what gets the gradients of q, k
    and v; then what `attngen::forward` takes, with a 16-bit `out_dtype`.
    Raises: SpecError with every violation; CompileError, LaunchError.
    """
    attend = torch.ops.attngen.forward if kernels else torch.ops.attngen.reference
    return tuple(attend(*given[_FIRST_OPERAND - 1 :]))


@torch.no_grad()
def _eager(kernels: bool, *given: Any) -> tuple[Tensor, ...]:
    """Results of `forward` for tensors that nobody looks on at."""
    return by_kernels(*given[_FIRST_OPERAND - 1 :]) if kernels else forward(False, *given)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keeps what the gradients need. Raises: SpecError where one is needed that there is not."""
    before, rest = inputs[:_FIRST_CARRIER], inputs[_FIRST_CARRIER:]
    needed = ctx.needs_input_grad[_FIRST_OPERAND:]
    for name, wanted in zip(INPUTS, needed, strict=False):
        if wanted:
            refuse_gradient(name)
    operands = (*rest[len(CARRIERS) :], *[None] * len(INPUTS))[: len(INPUTS)]
    out, lse, *maxima = output
    ctx.save_for_backward(out, lse, *operands)
    # Of a layer there is what it knows when the backward runs, which others change meanwhile.
    ctx.kernels, *form, ctx.scale, ctx.amax = before
    ctx.form = GradientForm(*form)
    ctx.arguments = Arguments(*rest[len(CARRIERS) + len(INPUTS) :])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*maxima)


def gradients(
    ctx: Any, d_o: Tensor | None, dlse: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of the operation's arguments, from those of its output and LSE."""
    needed = ctx.needs_input_grad  # the dispatcher left out what equals its default at the end
    returned: list[Tensor | None] = [None] * len(needed)
    if d_o is None and dlse is None:
        return tuple(returned)
    out, lse, *operands = ctx.saved_tensors
    places = {name: place for place, name in enumerate(CARRIERS, _FIRST_CARRIER)}
    places |= {name: _FIRST_OPERAND + INPUTS.index(name) for name in LEARNED}
    asked = {name for name, place in places.items() if place < len(needed) and needed[place]}
    wanted = wanted_of_operands(asked, one_tensor=operands[INPUTS.index("k")] is None)
    call = ctx.kernels, False, ctx.form, ctx.scale, ctx.amax, out, lse, operands, ctx.arguments
    found = _differentiate(FP8Call(*call), wanted, d_o, dlse)
    for name in asked:
        returned[places[name]] = found[GRADIENT_OF[name]]
    return tuple(returned)


def _differentiate(
    call: FP8Call, wanted: WantedGradients, d_o: Tensor | None, dlse: Tensor | None
) -> dict[str, Tensor]:
    """The gradients that are wanted, by their names, in as many bits as the call's form says."""
    if call.form.d_o_dtype:
        refuse_tangents((d_o, dlse))
        return call.differentiate(wanted, d_o, dlse)
    by_whom = _by_kernels if call.kernels else reference_fp8.differentiate
    return by_whom(wanted, d_o, dlse, call.out, call.lse, call.operands, call.arguments)


def _by_kernels(
    wanted: WantedGradients,
    d_o: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    operands: Sequence[Tensor | None],
    arguments: Arguments,
) -> dict[str, Tensor]:
    """The gradients that are wanted, by the kernels of 16 bits. Raises: SpecError."""
    wide = widened(operands, arguments, out.dtype)
    form = CallForm(arguments._replace(out_dtype=None, amax=False), places_of(wide))
    present = [x for x in wide if x is not None]
    if d_o is None or is_looked_at():
        return dispatch(form, wanted, d_o, dlse, out, lse, present)
    return differentiate(form, wanted, d_o, dlse, out, lse, present)


def widened(
    operands: Sequence[Tensor | None], arguments: Arguments, dtype: torch.dtype
) -> list[Tensor | None]:
    """The operands of the 16-bit call that an FP8 one stands for: those of a dtype that it has, and
    no scales."""
    layout = layout_of(arguments.layout)
    named = dict(zip(INPUTS, operands, strict=True))
    descales: dict[str, list[Tensor | None]] = {}
    for name in CARRIERS:
        carrier, _, _ = layout.home(name)
        descales.setdefault(carrier, []).append(named[f"descale_{name}"])
    for carrier, parts in descales.items():
        stored = named[carrier]
        assert stored is not None  # the layout has it
        named[carrier] = _dequantised(stored, parts, layout, carrier).to(dtype)
    if (added := named["bias"]) is not None:
        named["bias"] = added.to(dtype)
    return [None if name in SCALES else x for name, x in named.items()]


def _dequantised(
    stored: Tensor, descales: list[Tensor | None], layout: Layout, carrier: str
) -> Tensor:
    """A carrier in float32. descales: of each of the operands that are packed into it, [1], or
    [b, h_kv] or [b, h, s] of dense ones."""
    wide = stored.float()
    if all(x is None for x in descales):
        return wide
    axes = axes_of(layout, carrier)
    heads = stored.shape[axes.index("h")]
    factors = [_factor(x, axes, heads, wide) for x in descales]
    if len(factors) == 1:
        (factor,) = factors
        return wide * factor
    return wide * torch.cat(torch.broadcast_tensors(*factors), dim=axes.index(str(len(factors))))


def _factor(descale: Tensor | None, axes: list[str], heads: int, wide: Tensor) -> Tensor:
    """A descale as it multiplies a tensor of these axes, one of which may be packed."""
    if descale is None:
        return wide.new_ones([1] * len(axes))
    if descale.ndim == 1:
        return descale.reshape([1] * len(axes))
    if descale.ndim == TOKEN_AXES:
        return by_rows(descale, axes)
    batch, heads_kv = descale.shape
    sizes = {"b": batch, "h": heads}
    of_heads = descale.repeat_interleave(heads // heads_kv, dim=1)
    return of_heads.reshape([sizes.get(axis, 1) for axis in axes])


def _fake(kernels: bool, *given: Any) -> tuple[Tensor, ...]:
    attend = torch.ops.attngen.forward if kernels else torch.ops.attngen.reference
    return tuple(attend(*given[_FIRST_OPERAND - 1 :]))


# ---- of calls that nobody looks on at


@dataclass(frozen=True, eq=False)
class QuantisedCall:
    """An FP8 call with gradients that kernels serve, for all that differ from it in addresses
    alone.

    arguments: the operation's; places: those of `INPUTS` that there are; prepared: the launch, for
    a sequence of these.
    """

    arguments: Arguments
    places: tuple[int, ...]
    prepared: PreparedCall

    @classmethod
    def of(cls, operands: tuple[Tensor | None, ...], arguments: Arguments) -> QuantisedCall:
        """The call of these operands. Raises: SpecError, CompileError, LaunchError."""
        places = places_of(operands)
        place_of = {place: index for index, place in enumerate(places)}
        prepared = find_prepared(with_readable_bias(operands), arguments)
        homes = [place_of.get(place) for place in range(len(INPUTS))]
        return cls(arguments, places, prepared.placed(homes))

    def __call__(
        self, stores: StoredGradients, carriers: Sequence[Tensor | None], operands: Operands
    ) -> dict[str, Tensor]:
        """Its outputs by their names; carriers get the gradients of q, k and v. Raises: SpecError,
        LaunchError."""
        present = [x for x in carriers if x is not None]
        given = [x for x in operands if x is not None]
        found = _apply(self, stores, len(present), *present, *given)
        return dict(zip(self.prepared.names, found, strict=True))

    def all(self, present: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The operands of `INPUTS`, of those that there are."""
        named = dict(zip(self.places, present, strict=True))
        return tuple([named.get(place) for place in range(len(INPUTS))])

    def wanted(self, needed: Sequence[bool]) -> tuple[WantedGradients, tuple[str | None, ...]]:
        """Gradients that are asked for, and that of each tensor, None where it needs none.
        needed: which of the carriers and the operands need theirs."""
        return _wanted(self.places, tuple(needed))


@lru_cache
def _wanted(
    places: tuple[int, ...], needed: tuple[bool, ...]
) -> tuple[WantedGradients, tuple[str | None, ...]]:
    present = [INPUTS[place] for place in places]
    carriers = [name for name in present if name in CARRIERS]
    names = [*carriers, *present]
    asked = {*compress(names, needed)}
    pairs = zip(names, needed, strict=True)
    gradients = tuple(GRADIENT_OF[name] if each else None for name, each in pairs)
    return wanted_of_operands(asked, one_tensor="k" not in present), gradients


class _Quantised(torch.autograd.Function):
    """The launch of a `QuantisedCall`: of its carriers, then its operands."""

    @staticmethod
    def forward(
        ctx: Any, call: QuantisedCall, stores: StoredGradients, carriers: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        operands = tensors[carriers:]
        for place, needed in zip(call.places, ctx.needs_input_grad[3 + carriers :], strict=True):
            if needed:
                refuse_gradient(INPUTS[place])
        given = operands
        if _BIAS in call.places:
            given = tuple([x for x in with_readable_bias(call.all(operands)) if x is not None])
        outputs = run(call.prepared, given)
        ctx.save_for_backward(*outputs[:2], *operands)
        ctx.call, ctx.stores = call, stores
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[2:])
        return tuple(outputs)

    @staticmethod
    def backward(
        ctx: Any, d_o: Tensor | None, dlse: Tensor | None = None, *_: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        call: QuantisedCall = ctx.call
        needed = ctx.needs_input_grad[3:]
        if d_o is None and dlse is None:
            return (None,) * (3 + len(needed))
        out, lse, *operands = ctx.saved_tensors
        wanted, names = call.wanted(needed)
        form, _, scale, amax = ctx.stores
        given = FP8Call(True, True, form, scale, amax, out, lse, call.all(operands), call.arguments)
        found = _differentiate(given, wanted, d_o, dlse)
        return None, None, None, *[None if name is None else found[name] for name in names]


_apply: Callable[..., tuple[Tensor, ...]] = apply_of(_Quantised)


library.impl("quantised", forward, "CompositeExplicitAutograd")
torch.library.register_fake("attngen::quantised", _fake, lib=library)
dispatched = differentiable("quantised", gradients, setup_context, library=library, eager=_eager)
