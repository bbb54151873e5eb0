"""Operands of fragments, as operations take them and kernels read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..fragments.header import CAPTURED
from .fragments import SLOTS, FragmentOperand, as_number, operands_of
from .numbers import Arguments
from .position_checks import places_violations
from .positions import PLACES_SLOT
from .tensors import Described, dtype_name

PLACED = "places"  # the parameter of positions of each sequence
Optional = Mapping[str, "Described | None"]


def numbers_of(optional: Optional, arguments: Arguments) -> dict[str, int | float]:
    """Run-time values of the kernels' parameters: numbers, and strides of tensors."""
    numbers: dict[str, int | float] = {}
    for each in operands_of(arguments.mask, arguments.score_mod):
        if each.number >= 0:
            end = "_of_all" if each.operand.axes else ""
            value = as_number(each.operand, arguments.numbers.split()[each.number])
            numbers[each.parameter + end] = value
        numbers |= dict(_strides_of(each, optional.get(each.slot)))
    return numbers


def _strides_of(each: FragmentOperand, tensor: Described | None) -> Iterator[tuple[str, int]]:
    """Elements from one index of an axis to the next, 0 over one, and along axes that it lacks; of
    a captured tensor its sizes, too."""
    axes = each.operand.axes
    found = dict.fromkeys(axes, 0)
    if tensor is not None:
        own = axes[len(axes) - tensor.ndim :]
        steps = zip(own, tensor.shape, tensor.stride(), strict=True)
        found |= {axis: stride if size > 1 else 0 for axis, size, stride in steps}
    yield from ((f"{each.parameter}_stride_{axis}", stride) for axis, stride in found.items())
    if tensor is not None and each.operand.domain == CAPTURED:
        yield from ((f"{each.parameter}_size_{n}", size) for n, size in enumerate(tensor.shape))


def sources_of(optional: Optional, arguments: Arguments) -> tuple[tuple[str, str, int], ...]:
    """Parameters that hold addresses of tensors, with the operations' names of these."""
    found = operands_of(arguments.mask, arguments.score_mod)
    sources = [(x.parameter, x.slot, 0) for x in found if optional.get(x.slot) is not None]
    if places_of(optional, arguments) is not None:
        sources.append((PLACED, PLACES_SLOT, 0))
    return tuple(sources)


def places_of(optional: Optional, arguments: Arguments) -> Described | None:
    """The positions of each sequence of a call, None where it gives none of each."""
    return optional.get(PLACES_SLOT) if arguments.positions else None


def absent_from(optional: Optional, arguments: Arguments) -> tuple[str, ...]:
    """Parameters that hold no address, since a number stands for the tensor."""
    found = operands_of(arguments.mask, arguments.score_mod)
    absent = [x.parameter for x in found if x.slot and optional.get(x.slot) is None]
    return (*absent, *((PLACED,) if places_of(optional, arguments) is None else ()))


def violations(
    optional: Optional, arguments: Arguments, sequences: int, heads: int
) -> Iterator[str]:
    """Find what kernels cannot take of the operands of a call's fragments."""
    wanted = operands_of(arguments.mask, arguments.score_mod)
    counted = [each.operand for each in wanted if each.number >= 0]
    words = arguments.numbers.split()
    if len(words) != len(counted):
        yield f"numbers: the fragments of this call have {len(counted)}, got {words}"
    for operand, word in zip(counted, words, strict=False):
        try:
            as_number(operand, word)
        except ValueError:
            yield f"numbers: {operand.name} needs {operand.dtype}, got {word!r}"
    sizes = {"b": sequences, "h_q": heads}
    for each in wanted:
        tensor = optional.get(each.slot)
        dtype = "int32" if each.operand.dtype == "i32" else "float32"
        shapes = [tuple(sizes[axis] for axis in shape) for shape in each.shapes]
        captured = each.operand.domain == CAPTURED
        if tensor is not None and captured:
            if dtype_name(tensor) != each.operand.element or tensor.ndim != each.operand.rank:
                got = f"{dtype_name(tensor)} {list(tensor.shape)}"
                needs = f"{each.operand.element} of {each.operand.rank} axes"
                yield f"{each.slot} is {each.name}, {needs}; got {got}"
        elif tensor is None and each.number < 0:
            yield f"{each.slot} is {each.name}, which {each.fragment.name} needs; got None"
        elif tensor is not None and (
            dtype_name(tensor) != dtype or tuple(tensor.shape) not in shapes
        ):
            got = f"{dtype_name(tensor)} {list(tensor.shape)}"
            needs = " or ".join(str(list(shape)) for shape in shapes)
            yield f"{each.slot} is {each.name}, {dtype} {needs}; got {got}"
    places = places_of(optional, arguments)
    yield from places_violations(places, sequences)
    known = {each.slot for each in wanted} | ({PLACES_SLOT} if places is not None else set())
    for slot in set(SLOTS) - known:
        if optional.get(slot) is not None:
            yield f"{slot} is an operand of no fragment that this call names"
