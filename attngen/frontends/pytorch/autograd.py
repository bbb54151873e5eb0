"""Gradients of `attngen::forward`, which are `attngen::backward`'s: as the operations have them,
and as a function of autograd that launches both with nothing between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ...call.gradient_checks import no_gradient
from ...call.gradient_kernels import wanted_of_operands
from ...call.prepared import PreparedCall
from ...call.table import GRADIENT_OF, INPUTS, WantedGradients
from ...errors import SpecError
from . import bias
from .backward import differentiate, dispatch
from .operation import run
from .signature import CallForm, places_of, split
from .torch_private import apply_of, levels, undisturbed

_BIAS = INPUTS.index("bias")


def refuse_gradient(name: str) -> None:
    """Raises: SpecError where the operand of that name has none."""
    if (reason := no_gradient(name)) is not None:
        raise SpecError(reason)


# ---- of the operation


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keeps what the gradients need. Raises: SpecError where one is needed that there is not."""
    for name, wanted in zip(INPUTS, ctx.needs_input_grad, strict=False):
        if wanted:
            refuse_gradient(name)
    q, k, v, *rest = inputs
    optional, arguments = split(rest)
    out, lse, *maxima = output
    ctx.save_for_backward(out, lse, q, k, v, *optional)
    ctx.arguments = arguments
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*maxima)


def gradients(
    ctx: Any, d_o: Tensor | None, dlse: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of the operation's arguments, from those of its output and LSE."""
    given = ctx.needs_input_grad  # the dispatcher left out what equals its default at the end
    returned: list[Tensor | None] = [None] * len(given)
    if d_o is None and dlse is None:
        return tuple(returned)
    out, lse, *operands = ctx.saved_tensors
    call = CallForm(ctx.arguments, places_of(operands))
    needed = tuple(place < len(given) and given[place] for place in call.places)
    wanted, names = _asked(call.places, needed)
    present = [x for x in operands if x is not None]
    found = dispatch(call, wanted, d_o, dlse, out, lse, present)
    for place, name in zip(call.places, names, strict=True):
        if name is not None:
            returned[place] = found[name]
    return tuple(returned)


@lru_cache
def _asked(
    places: tuple[int, ...], needed: tuple[bool, ...]
) -> tuple[WantedGradients, tuple[str | None, ...]]:
    """Gradients that a backward is asked for, and that of each operand that there is, None where it
    needs none."""
    present = [INPUTS[place] for place in places]
    wanted = set(compress(present, needed))
    names = tuple(GRADIENT_OF[name] if name in wanted else None for name in present)
    return wanted_of_operands(wanted, one_tensor="k" not in present), names


# ---- of calls that nobody looks on at


def is_looked_at() -> bool:
    """Whether a backward is an operation's: second and forward-mode derivatives are its to
    refuse."""
    looked_at = torch.is_grad_enabled() or levels._current_level >= 0
    return looked_at or torch.compiler.is_compiling() or not undisturbed()


@dataclass(frozen=True, eq=False)
class DifferentiableCall:
    """A call with gradients, for all that differ from it in addresses alone.

    form: its arguments and operands. prepared: the launch, for a list of the tensors that there
    are; constant: which of these have no gradient, and their names; bias: which of them is one;
    by_products: whether all outputs are wanted or the first alone.
    """

    form: CallForm
    prepared: PreparedCall
    constant: tuple[tuple[int, str], ...]
    bias: int | None
    by_products: bool

    @classmethod
    def of(cls, form: CallForm, prepared: PreparedCall, by_products: bool) -> DifferentiableCall:
        """The call of this form; prepared: its launch, for all operands."""
        place_of = {place: index for index, place in enumerate(form.places)}
        homes = [place_of.get(place) for place in range(len(INPUTS))]
        names = enumerate(INPUTS[place] for place in form.places)
        constant = tuple((index, name) for index, name in names if name not in GRADIENT_OF)
        return cls(form, prepared.placed(homes), constant, place_of.get(_BIAS), by_products)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of what it returns, in their order."""
        return self.prepared.names if self.by_products else self.prepared.names[:1]

    def of_bound(self, order: tuple[int, ...]) -> Callable[[list[Tensor]], tuple[Tensor, ...]]:
        """The call for a list of tensors, of which operands are those at these places."""
        if order == tuple(range(len(order))):
            return self
        pick = itemgetter(*order)
        return lambda tensors: self(pick(tensors))

    def __call__(self, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs that are wanted, with their gradients. Raises: SpecError, LaunchError."""
        return _apply(self, *operands)


class Attention(torch.autograd.Function):
    """The operation as the dispatcher differentiates it, which through Python would take it a
    millisecond (H200 machine, torch 2.11)."""

    @staticmethod
    def forward(ctx: Any, trained: DifferentiableCall, *operands: Tensor) -> tuple[Tensor, ...]:
        for index, name in trained.constant:
            if ctx.needs_input_grad[1 + index]:
                refuse_gradient(name)
        given = operands
        if (place := trained.bias) is not None:
            given = (*given[:place], bias.readable(given[place]), *given[place + 1 :])
        outputs = run(trained.prepared, given)
        ctx.save_for_backward(*outputs[:2], *operands)
        ctx.form = trained.form
        ctx.set_materialize_grads(False)
        if not trained.by_products:
            return tuple(outputs[:1])
        ctx.mark_non_differentiable(*outputs[2:])
        return tuple(outputs)

    @staticmethod
    def backward(
        ctx: Any, d_o: Tensor | None, dlse: Tensor | None = None, *_: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        form: CallForm = ctx.form
        if d_o is None and dlse is None:
            return (None,) * (1 + len(form.places))
        out, lse, *operands = ctx.saved_tensors
        wanted, names = _asked(form.places, ctx.needs_input_grad[1:])
        if d_o is None or is_looked_at():
            found = dispatch(form, wanted, d_o, dlse, out, lse, operands)
        else:
            found = differentiate(form, wanted, d_o, dlse, out, lse, operands)
        return None, *[None if name is None else found[name] for name in names]


_apply: Callable[..., tuple[Tensor, ...]] = apply_of(Attention)
