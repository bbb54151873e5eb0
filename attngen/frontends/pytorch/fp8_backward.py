"""The operation `attngen::fp8_backward`: gradients of FP8 attention in 8 bits, by kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...call.cache import CallCache
from ...call.fp8_checks import BACKWARD_SCALES as SCALES
from ...call.fp8_gradients import MAXIMA
from ...call.numbers import Arguments
from ...call.prepare.backward import PreparedBackward, prepare_backward
from ...call.prepared import refuse_addresses
from ...call.table import (
    GRADIENT_OF,
    INPUTS,
    OPTIONAL,
    ROW_OF_OPERAND,
    WantedGradients,
)
from ...errors import SpecError
from . import backward as in_16_bits
from .descriptions import described_by_name, device_of
from .operation import format_of
from .outputs import output_dtype
from .registry import operator
from .signature import schema, split, wanted_and_mixed
from .torch_private import guard
from .transforms import differentiable

library = operator(
    "fp8_backward",
    "(Tensor d_o, Tensor? dlse, Tensor q, Tensor? k, Tensor? v, Tensor o, Tensor lse, "
    f"{schema()}, {', '.join(f'Tensor? {name}=None' for name in SCALES)}, "
    f"{', '.join(f'bool want_{name}=True' for name in WantedGradients._fields)}, "
    "bool mixed=False) -> "
    f"({', '.join('Tensor' for _ in (*GRADIENT_OF, *MAXIMA))})",
)
backwards: CallCache[PreparedBackward] = CallCache(guard)
_COUNT = len(OPTIONAL) + len(Arguments._fields)


def fp8_backward(
    d_o: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    o: Tensor,
    lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v, contiguous and packed as they are, in `out_dtype` (bfloat16 where
    the arguments name none), of the sink and of the bias, as `attngen::backward` has them; then the
    maxima of dS with the softmax scale, of dQ, dK and dV, float32 [1], [0] where `amax` does not
    ask for them; 0 of a gradient that kernels have not made, since nobody wants it.

    q, k, v, rest: as `attngen::forward` took them, FP8, addresses multiples of 16 bytes. d_o: FP8
    in Q's format. o: its output, FP8 or 16 bits; lse: its LSE. dlse: gradient of the LSE, or None.
    Behind the arguments: descale_o, descale_do, scale_dp, descale_dp, scale_dq, scale_dk, scale_dv,
    float32 [1], None for 1; then which gradients are wanted, and whether the backward is mixed: P
    and dS in bfloat16, dV, dK and dQ products of 16 bits.
    Raises: SpecError with every violation; CompileError, LaunchError.
    """
    optional, arguments = split(rest)
    scales, (wanted, mixed) = _scales(rest), _wanted(rest, k is None)
    operands = dict(zip(INPUTS, (q, k, v, *optional), strict=True))
    there = {"d_o": d_o, "o": o, "lse": lse, **operands, "dlse": dlse, **scales}
    found = differentiate(arguments, wanted, there, mixed=mixed)
    return tuple(
        found[name] if name in found else q.new_empty(0, dtype=_dtype_of(name, q, arguments))
        for name in (*GRADIENT_OF.values(), *MAXIMA)
    )


def differentiate(
    arguments: Arguments,
    wanted: WantedGradients,
    there: dict[str, Tensor | None],
    *,
    mixed: bool = False,
) -> dict[str, Tensor]:
    """The gradients that are wanted, and the maxima if arguments ask for them, by their names, of a
    call that nobody looks on at.

    there: the operation's tensors by their names; with `amax_dp`, float32 [1], which the kernels
    raise to the largest magnitude of dS.
    Raises: SpecError with every violation; CompileError, LaunchError.
    """
    tensors = [x for x in there.values() if x is not None]
    key = arguments, wanted, mixed, *[name for name, x in there.items() if x is not None]
    if (known := backwards.find(key, tensors)) is not None:
        pointers = [x.data_ptr() for x in tensors]
        if not any([pointers[place] % 16 for place in known.read]):
            return in_16_bits.run(known, tensors, pointers)
    d_o, o, lse, q, dlse = (there[name] for name in ("d_o", "o", "lse", "q", "dlse"))
    assert d_o is not None and o is not None and lse is not None and q is not None
    given = there | {"o": in_16_bits.copied(o), "d_o": in_16_bits.copied(d_o)}
    given |= {"lse": lse.contiguous(), "dlse": None if dlse is None else dlse.contiguous()}
    prepared = backwards.remember(
        (arguments, wanted, mixed, *given, *map(format_of, given.values())),
        lambda: prepare_backward(
            *(described_by_name(given), arguments, wanted, False, device_of(q.device)),
            mixed=mixed,
        ),
    )
    readable = [x for x in given.values() if x is not None]
    if all(x is y for x, y in zip(readable, tensors, strict=True)):
        backwards.note(key, tensors, prepared)
    pointers = [x.data_ptr() for x in readable]
    if any([pointers[place] % 16 for place in prepared.read]):
        refuse_addresses(pointers)  # before the first kernel, which no tensor map guards
    return in_16_bits.run(prepared, readable, pointers)


def _dtype_of(gradient: str, q: Tensor, arguments: Arguments) -> torch.dtype:
    """The dtype of a result: that of maxima and of operands in float32 is theirs."""
    rows = (ROW_OF_OPERAND[name] for name, its in GRADIENT_OF.items() if its == gradient)
    in_float32 = gradient in MAXIMA or any(row.dtype == "float32" for row in rows)
    if in_float32:
        return torch.float32
    return torch.bfloat16 if gradient == GRADIENT_OF["bias"] else output_dtype(q, arguments)


def _scales(rest: Sequence[Any]) -> dict[str, Tensor | None]:
    """Scales of the backward alone, by their names. The dispatcher leaves out what stands at the
    end and equals its default."""
    return dict.fromkeys(SCALES) | dict(zip(SCALES, rest[_COUNT:], strict=False))


def _wanted(rest: Sequence[Any], one_tensor: bool) -> tuple[WantedGradients, bool]:
    """Gradients that are wanted, and whether it is mixed, which stand behind the scales."""
    return wanted_and_mixed((*rest[:_COUNT], *rest[_COUNT + len(SCALES) :]), one_tensor)


def _fake(
    d_o: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor | None, v: Tensor | None, *others: Any
) -> tuple[Tensor, ...]:
    _o, _lse, *rest = others
    optional, arguments = split(rest)
    operands = dict(zip(INPUTS, (q, k, v, *optional), strict=True))
    wanted, _ = _wanted(rest, k is None)
    shapes = in_16_bits.shapes_of(operands, wanted)
    shapes |= dict.fromkeys(MAXIMA, (int(arguments.amax),))
    return tuple(
        q.new_empty(shape, dtype=_dtype_of(name, q, arguments)) for name, shape in shapes.items()
    )


def second_derivative(*_: Any) -> None:
    """Raises: SpecError."""
    raise SpecError(
        "FP8 calls have no second derivative (a gradient was made with create_graph=True and "
        "differentiated); leave them in 16 bits with attngen.fp8.autocast(enabled=False)"
    )


library.impl("fp8_backward", fp8_backward, "CUDA")
torch.library.register_fake("attngen::fp8_backward", _fake, lib=library)
dispatched = differentiable("fp8_backward", second_derivative, library=library, eager=fp8_backward)
