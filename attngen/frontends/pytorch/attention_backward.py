"""`attngen.attention_backward`: gradients of a call without autograd, of what it returned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import reference
from ...call.gradient_kernels import wanted_of_operands
from ...call.recipe import in_force
from ...call.table import GRADIENT_OF, LEARNED, ROWS, AttentionCall, make_call
from ...errors import LimitError, SpecError
from ...reference.fp8 import is_fp8
from ...results import AttentionGradients
from . import left_padding, on_reference, routing
from .backward import differentiate, dispatch
from .checked_call import CheckedCall, operands_of
from .checks import check_rest
from .operation import unobserved
from .signature import CallForm, places_of

_LEAVES = ("q", "k", "v", *LEARNED)


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    **given: Any,
) -> AttentionGradients:
    """Gradients of `attention(q, k, v, **given)`, by its kernels of the backward.

    Args:
        dout: of the output, in its shape and dtype.
        q, k, v: as the call took them, in 16 bits on kernels; packed ones have a packed gradient.
        out, lse: as `attention(…, return_lse=True)` returned them.
        dlse: of the LSE, float32 in its shape; None where nothing depends on it.
        given: whatever else the call was given: with dropout the `rng_state` that it returned.
            Functions, schedules, rows that begin late (`seqstart_q`) and 8 bits are refused.

    Returns: contiguous gradients in the operands' dtypes, or as `out_layout` lays them out; None
        of what the call has not.

    Raises:
        SpecError: with every violation at once.
        CompileError, LaunchError: where a kernel cannot be made or launched.
    """
    carriers = {"q": q, "k": k, "v": v}
    operands, others = (
        {name: _leaf(x) if name in _LEAVES else x for name, x in x.items()}
        for x in (carriers, given)
    )
    call = reference.converted(make_call("attention_backward", ROWS, operands, others))
    _refuse(call)
    refusal: SpecError | LimitError | None = None
    with torch.enable_grad():
        on_kernels = routing.use_kernels(call)
    if on_kernels:
        try:
            return _by_kernels(call, dout, dlse, out, lse)
        except (SpecError, LimitError) as error:
            refusal = error
    if refusal is not None:
        routing.leave_kernels(refusal, call.backend)
    return _by_definition(call, dout, dlse)


def _leaf(x: object) -> object:
    """A tensor apart from whatever made it, which needs a gradient; anything else as it is."""
    return x.detach().requires_grad_() if isinstance(x, Tensor) else x


def _refuse(call: AttentionCall) -> None:
    """Raises: SpecError where the call has no gradient here."""
    check_rest(call.num_splits, call.deterministic, call.schedule)
    asked = {
        "functions": call.functions,
        "a schedule": call.schedule is not None,
        "out": call.out is not None,
        "rows that begin late": left_padding.is_given(call),
        "operands in 8 bits": isinstance(call.q, Tensor) and is_fp8(call.q.dtype),
        "a recipe": in_force.recipe is not None,
    }
    reasons = [f"attention_backward takes no {name}" for name, there in asked.items() if there]
    if call.dropout_p > 0 and call.rng_state is None:
        reasons.append("dropout needs the rng_state that the call returned")
    if reasons:
        raise SpecError(reasons)


def _leaves(call: AttentionCall) -> dict[str, Tensor]:
    """The operands that have a gradient, by their names."""
    found = {name: getattr(call, name) for name in _LEAVES}
    return {name: x for name, x in found.items() if isinstance(x, Tensor)}


def _by_kernels(
    call: AttentionCall, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> AttentionGradients:
    """Raises: SpecError, LimitError, CompileError, LaunchError."""
    leaves, operands = _leaves(call), operands_of(call)
    checked = CheckedCall.of(call, operands)
    with torch.no_grad():
        operands = checked.completed(checked.adapted(operands, None))
        operands = tuple([None if x is None else x.detach() for x in operands])
        present = [x for x in operands if x is not None]
        form = CallForm(checked.arguments, places_of(operands))
        wanted = wanted_of_operands({*leaves}, one_tensor=call.k is None)
        plain = unobserved((dout, dlse, out, lse, *present)) and not torch.compiler.is_compiling()
        run = differentiate if plain else dispatch
        found = run(form, wanted, dout, dlse, out, lse, present)
        made = {
            GRADIENT_OF[name]: found[GRADIENT_OF[name]].to(x.dtype) for name, x in leaves.items()
        }
    return AttentionGradients(**made)


def _by_definition(call: AttentionCall, dout: Tensor, dlse: Tensor | None) -> AttentionGradients:
    """Raises: SpecError where a gradient does not fit."""
    leaves = _leaves(call)
    with torch.enable_grad():
        out, aux = on_reference.run(call)
        pairs = [(out, dout), *([(aux.lse, dlse)] if dlse is not None else [])]
        for result, gradient in pairs:
            assert result is not None  # the reference has an LSE
            if result.shape != gradient.shape:
                raise SpecError(f"a gradient of {[*result.shape]} is {[*gradient.shape]}")
        outputs, gradients = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, [*leaves.values()], gradients)
    names = (GRADIENT_OF[name] for name in leaves)
    return AttentionGradients(**dict(zip(names, found, strict=True)))
