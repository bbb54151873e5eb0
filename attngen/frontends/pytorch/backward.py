"""The operation `attngen::backward`: gradients of 16-bit attention, by compiled kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...call.cache import CallCache
from ...call.gradient_kernels import names_of
from ...call.memory import order_in
from ...call.numbers import Arguments
from ...call.operands import boxed
from ...call.prepare.backward import PreparedBackward, prepare_backward
from ...call.table import CARRIERS, GRADIENT_OF, INPUTS, ROW_OF_OPERAND, WantedGradients
from ...errors import SpecError
from . import learned, routing, sinks
from .checks import check_rows
from .descriptions import described_by_name, device_of
from .operation import current, format_of, is_current, new_tensor, start
from .outputs import new_ordered
from .registry import operator
from .signature import CallForm, places_of, schema, split, wanted_of
from .torch_private import guard, is_plain
from .transforms import differentiable, refuse_tangents

library = operator(
    "backward",
    "(Tensor d_o, Tensor? dlse, Tensor q, Tensor? k, Tensor? v, Tensor o, Tensor lse, "
    f"{schema()}, {', '.join(f'bool want_{name}=True' for name in WantedGradients._fields)}) -> "
    f"({', '.join('Tensor' for _ in GRADIENT_OF)})",
)

backwards: CallCache[PreparedBackward] = CallCache(guard)


def backward(
    d_o: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    o: Tensor,
    lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v, packed as they are, contiguous or in the orders of `memory`, of the
    sink and of the bias. The first have the dtype of q, or float32 where out_dtype says so, as
    parts of sums need it; [0] where they are not wanted, packed into another, or there is no such
    tensor.

    q, k, v and rest as `attngen::forward` took them, o and lse as it returned them, in 16 bits.
    d_o, dlse: gradients of o and of the LSE, None where nothing depends on it. want_dq …, after the
    rest: kernels that make unwanted gradients alone are left out.
    Raises: SpecError with every violation; CompileError, LaunchError.
    """
    (optional, arguments), wanted = split(rest), wanted_of(rest, k is None)
    operands = dict(zip(INPUTS, (q, k, v, *optional), strict=True))
    form = CallForm(arguments, places_of(tuple(operands.values())))
    present = [x for x in operands.values() if x is not None]
    found = differentiate(form, wanted, d_o, dlse, o, lse, present, dispatched=True)
    return tuple(
        found[gradient] if gradient in found else _like(name, q, lse, arguments).new_empty(0)
        for name, gradient in GRADIENT_OF.items()
    )


def _like(name: str, q: Tensor, lse: Tensor, arguments: Arguments) -> Tensor:
    """A tensor with the dtype that the gradient of the operand of that name has."""
    wide = name in CARRIERS and arguments.out_dtype == "float32"
    return lse if wide or ROW_OF_OPERAND[name].dtype == "float32" else q


def differentiate(
    form: CallForm,
    wanted: WantedGradients,
    d_o: Tensor,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    operands: list[Tensor],
    *,
    dispatched: bool = False,
) -> dict[str, Tensor]:
    """The gradients that are wanted, by their names, of a call that nobody looks on at. operands:
    those that it has. dispatched: by the operation, which else is asked where one is not plain.

    Raises: SpecError with every violation; CompileError, LaunchError.
    """
    if routing.CHECK_VALUES and form.by_name(operands)["bias"] is None and is_plain(lse):
        check_rows(lse)
    tensors = [d_o, o, lse, *operands]
    if dlse is not None:
        tensors.append(dlse)
    key = form, wanted, dlse is None
    if (known := backwards.find(key, tensors)) is not None:
        pointers = [x.data_ptr() for x in tensors]
        if known.gathers or not any([pointers[place] % 16 for place in known.read]):
            return run(known, tensors, pointers)
    if not (dispatched or all(map(is_plain, tensors))):
        return dispatch(form, wanted, d_o, dlse, o, lse, operands)
    there = {"d_o": d_o, "o": o, "lse": lse, **form.by_name(operands), "dlse": dlse}
    q, k, v = (there[name] for name in "qkv")
    assert q is not None  # the operation's schema
    boxes = not (_odd(q) or _odd(o)) and all(boxed(x) for x in (q, k, v) if x is not None)
    gather = not (boxes and all(readable(x) for x in (q, k, v) if x is not None))
    if not gather:
        there |= {"o": copied(o), "d_o": copied(d_o)}
    there["lse"] = lse.contiguous()
    if dlse is not None:
        there["dlse"] = dlse.float().contiguous()
    formats = (form.arguments, wanted, gather, *map(format_of, there.values()))
    prepared = backwards.remember(
        formats,
        lambda: prepare_backward(
            *(described_by_name(there), form.arguments, wanted, gather, device_of(q.device))
        ),
    )
    given = [x for x in there.values() if x is not None]
    as_given = all(x is y for x, y in zip(given, tensors, strict=True))
    if as_given and gather != boxes:  # formats, and not the addresses, say where it is read from
        backwards.note(key, tensors, prepared)
    return run(prepared, given, [x.data_ptr() for x in given])


def dispatch(
    form: CallForm,
    wanted: WantedGradients,
    d_o: Tensor | None,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    operands: list[Tensor],
) -> dict[str, Tensor]:
    """Gradients by the operation, for whoever looks on. Raises: SpecError, also for a tangent."""
    refuse_tangents((d_o, dlse))
    q, k, v, *optional = form.by_name(operands).values()
    found = _dispatched(
        *(torch.zeros_like(o) if d_o is None else d_o, dlse, q, k, v, o, lse),
        *(*optional, *form.arguments, *wanted),
    )
    return dict(zip(GRADIENT_OF.values(), found, strict=True))


def readable(tensor: Tensor) -> bool:
    """Whether the copy engine can read a tensor where it is."""
    return tensor.data_ptr() % 16 == 0 and boxed(tensor)


def _odd(tensor: Tensor) -> bool:
    return tensor.shape[-1] % 8 != 0


def copied(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where the copy engine could not read it: autograd hands over what it
    has, such as one number expanded to a whole tensor, and kernels whose warps copy rows take
    longer than that."""
    return tensor if readable(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def run(
    prepared: PreparedBackward, tensors: Sequence[Tensor], pointers: list[int]
) -> dict[str, Tensor]:
    """The gradients that are wanted, on the current stream. tensors: those that there are, in the
    order of its names; pointers: their addresses, to which those of results are added."""
    if not is_current(prepared.device):
        with current(prepared.device):
            return run(prepared, tensors, pointers)
    made, workspace = {}, None
    for output in prepared.outputs:
        made[output.name] = tensor = new_tensor(output)
        if output.preset:
            tensor.zero_()
        pointers.append(tensor.data_ptr())
    if prepared.launches:
        before = partial(reset, prepared) if prepared.resets else None
        workspace = start(prepared, pointers, before)
    else:
        for tensor in made.values():
            tensor.zero_()
    found = {name: made[name] for name in prepared.returned}
    if prepared.learned:
        given = dict(zip(prepared.names, tensors, strict=True))
        left = learned.Results(prepared, given, made, workspace)
        for name in prepared.learned:
            found[name] = learned.GRADIENTS[name](left)
    return found


def reset(prepared: PreparedBackward, workspace: Tensor) -> None:
    """Prepare what kernels need prepared of the workspace."""
    if prepared.counts:
        first, end = prepared.counts
        workspace[first:end].zero_()
    if prepared.resets_rows and prepared.rows:
        sinks.reset(workspace, prepared.rows)


def _fake_backward(
    d_o: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor | None, v: Tensor | None, *others: Any
) -> tuple[Tensor, ...]:
    _o, lse, *rest = others
    (optional, arguments), wanted = split(rest), wanted_of(rest, k is None)
    shapes = shapes_of(dict(zip(INPUTS, (q, k, v, *optional), strict=True)), wanted)
    made = []
    for name, gradient in GRADIENT_OF.items():
        like, shape = _like(name, q, lse, arguments), shapes[gradient]
        order = order_in(arguments, name)
        made.append(new_ordered(like, shape, order if len(order) == len(shape) else "", like.dtype))
    return tuple(made)


def shapes_of(
    operands: Mapping[str, Tensor | None], wanted: WantedGradients
) -> dict[str, Sequence[int]]:
    """Shapes of an operation's gradients by their names, [0] of operands that are not there, and of
    gradients that are not wanted."""
    fields = wanted._asdict()
    asked = {*names_of(wanted), *(name for name in fields if fields[name])}
    return {
        gradient: (0,) if (x := operands[name]) is None or gradient not in asked else x.shape
        for name, gradient in GRADIENT_OF.items()
    }


def _second_derivative(*_: Any) -> None:
    raise SpecError(
        "kernels have no second derivative (a gradient was made with create_graph=True and "
        "differentiated); pass backend='reference'"
    )


library.impl("backward", backward, "CUDA")
torch.library.register_fake("attngen::backward", _fake_backward, lib=library)
_dispatched = differentiable("backward", _second_derivative, library=library)
