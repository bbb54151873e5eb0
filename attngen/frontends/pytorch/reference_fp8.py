"""The operation `attngen::reference_fp8_backward`: the definition of FP8's backward as torch's
tracers see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...call.fp8_checks import BACKWARD_SCALES
from ...call.fp8_gradients import MAXIMA
from ...call.numbers import Arguments
from ...call.table import GRADIENT_OF, INPUTS, LEARNED, WantedGradients
from ...call.tensors import name_of
from ...reference.fp8_backward import differentiate_call
from ...reference.fp8_backward_tensors import BackwardOperands
from .fp8_backward import second_derivative
from .on_reference import call_of
from .registry import operator
from .signature import dtype_of, schema, split, wanted_and_mixed
from .transforms import differentiable

library = operator(
    "reference_fp8_backward",
    "(Tensor d_o, Tensor? dlse, Tensor o, Tensor lse, "
    f"{', '.join(f'Tensor? {name}' for name in BACKWARD_SCALES)}, "
    f"Tensor q, Tensor? k, Tensor? v, {schema()}, "
    f"{', '.join(f'bool want_{name}=True' for name in WantedGradients._fields)}, "
    "bool mixed=False) -> "
    f"({', '.join(['Tensor'] * (len(GRADIENT_OF) + len(MAXIMA)))})",
)


def backward(
    d_o: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Gradients and maxima as `reference.fp8_backward` has them, [0] of what is not wanted.

    rest: the scales of `BACKWARD_SCALES`, then what `attngen::forward` took, whose `out_dtype` is
    the gradients', then which of these are wanted, and whether the backward is mixed. Raises:
    SpecError with every violation.
    """
    scales = dict(zip(BACKWARD_SCALES, rest, strict=False))
    q, k, v, *others = rest[len(BACKWARD_SCALES) :]
    optional, arguments = split(others)
    wanted, mixed = wanted_and_mixed(others, k is None)
    operands = (q, k, v, *optional)
    dtype = torch.bfloat16 if arguments.out_dtype is None else dtype_of(arguments.out_dtype)
    call = call_of(operands, (*optional, *arguments._replace(out_dtype=None, amax=False)))
    given = BackwardOperands(d_o=d_o, o=o, lse=lse, dlse=dlse, dtype=dtype, mixed=mixed, **scales)
    found = differentiate_call(call, given)
    nothing = d_o.new_empty(0, dtype=torch.float32)
    asked = wanted._asdict() | {"dk": wanted.dkv, "dv": wanted.dkv}
    there = found.by_name
    made = [there.get(name) if asked[name] else None for name in GRADIENT_OF.values()]
    maxima = [getattr(found, name) for name in MAXIMA]
    return tuple(nothing.clone() if x is None else x for x in (*made, *maxima))


def differentiate(
    wanted: WantedGradients,
    d_o: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    operands: Sequence[Tensor | None],
    arguments: Arguments,
) -> dict[str, Tensor]:
    """The gradients of a call whose output has 16 bits, by their names and in its dtype; those of
    biases in theirs. Raises: SpecError with every violation."""
    d_o = torch.zeros_like(out) if d_o is None else d_o
    given = d_o, dlse, out, lse, *[None] * len(BACKWARD_SCALES)
    asked = arguments._replace(out_dtype=name_of(out.dtype))
    found = dispatched(*given, *operands, *asked, *wanted)
    gradients = dict(zip(GRADIENT_OF.values(), found, strict=False))
    for name in LEARNED:
        of = operands[INPUTS.index(name)]
        if of is not None:
            gradients[GRADIENT_OF[name]] = gradients[GRADIENT_OF[name]].to(of.dtype)
    return gradients


def _fake(
    d_o: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    q, k, v, *others = rest[len(BACKWARD_SCALES) :]
    optional, arguments = split(others)
    wanted, _ = wanted_and_mixed(others, k is None)
    dtype = torch.bfloat16 if arguments.out_dtype is None else dtype_of(arguments.out_dtype)
    given = dict(zip(INPUTS, (q, k, v, *optional), strict=True))
    asked = wanted._asdict() | {"dk": wanted.dkv, "dv": wanted.dkv}
    made = []
    for name, gradient in GRADIENT_OF.items():
        x = given[name] if asked[gradient] else None
        of = torch.float32 if x is None or name in LEARNED else dtype
        made.append(q.new_empty(0 if x is None else x.shape, dtype=of))
    return *made, *[q.new_empty(1, dtype=torch.float32) for _ in MAXIMA]


library.impl("reference_fp8_backward", backward, "CompositeExplicitAutograd")
torch.library.register_fake("attngen::reference_fp8_backward", _fake, lib=library)
dispatched = differentiable("reference_fp8_backward", second_derivative, library=library)
