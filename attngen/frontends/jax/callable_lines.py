"""Lines of programs: nodes of a traced function, each in terms of a program's operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ...errors import SpecError
from ...fragments.building import Operations
from ...fragments.program import ELEMENTS
from .callable_graph import PARTS, Node

_UNARY = {
    **{name: name for name in (
        "exp exp2 log log1p expm1 sin cos tanh sqrt rsqrt erf floor ceil abs neg sign").split()},
    "logistic": "sigmoid",
}  # fmt: skip
_BINARY = {"add": "add", "add_any": "add", "sub": "sub", "mul": "mul", "max": "max", "min": "min"}
_COMPARED = frozenset("ge gt le lt eq ne".split())
_SHIFTS = {"shift_left": "shl", "shift_right_arithmetic": "shr"}
_SAME = frozenset("copy stop_gradient reduce_precision optimization_barrier".split())
_TYPES = {"bool": "b", "int32": "i", "int64": "l"}  # others that are computed with are floats
_MOST_POWER = 8  # of a whole exponent that becomes products


@dataclass
class View:
    """Part of a captured array: an index for each of its axes, None for one that is left.

    axes: for each axis of the part that of the array which it is, None of one of length 1 that is
    none.
    """

    capture: int
    indices: list[str | None]
    axes: list[int | None]


@dataclass
class Lines:
    """Nodes, made into operations where they are asked for. name: of the function's argument."""

    name: str
    built: Operations = field(default_factory=Operations)
    captures: list[Array] = field(default_factory=list)
    known: dict[Node, str | View] = field(default_factory=dict)

    def refusal(self, node: Node) -> SpecError:
        """The error of an operation that programs have not."""
        return SpecError(
            f"{self.name} has an operation that kernels lack, {node.name} of {node.dtype}. Compute "
            "what depends on no position before the call, or pass backend='reference'."
        )

    def number(self, node: Node, type_: str | None = None, kept: bool = False) -> str:
        """A node as a value, of that type; kept: whether a number is part of the program."""
        own = type_of(node.dtype)
        if kept and not node.inputs and not node.reads:
            return self.built.constant(_item(node), type_ or own, kept)
        value = self._value(node)
        if isinstance(value, View):
            if None in value.indices:
                raise SpecError(
                    f"{self.name} reads a row of a captured array. Read one number a position, as "
                    "t[b, h]."
                )
            self.known[node] = value = self._load(value)
        if type_ is None or own == type_:
            return value
        _, is_literal, word = value.partition(":")
        if is_literal and type_ != "b":
            return f"{type_}:{float(word) if type_ == 'f' else int(float(word))}"
        return self.built.emit("cast", type_, value)

    def _value(self, node: Node) -> str | View:
        if node not in self.known:
            if node.name == "input":
                self.known[node] = node.given
            elif node.inputs:
                self.known[node] = self._lowered(node)
            elif node.reads:
                self.known[node] = self._captured(node.evaluate())
            else:
                self.known[node] = self.built.constant(_item(node), type_of(node.dtype))
        return self.known[node]

    def _captured(self, array: Array) -> View:
        """A captured array, in a dtype and of a rank that kernels read."""
        place = next((n for n, x in enumerate(self.captures) if x is array), len(self.captures))
        self.captures += [array] * (place == len(self.captures))
        if not array.ndim:
            return View(place, ["i:0"], [])
        return View(place, [None] * array.ndim, [*range(array.ndim)])

    def _load(self, view: View) -> str:
        _, type_ = ELEMENTS[element_of(self.captures[view.capture])]
        indices = [each for each in view.indices if each is not None]
        return self.built.emit("load", type_, str(view.capture), *indices)

    def _lowered(self, node: Node) -> str | View:
        """The value of a node that depends on a position."""
        of_views: dict[str, Callable[[Node], str | View]] = {
            "dynamic_slice": self._slice,
            **dict.fromkeys(PARTS[1:], self._reshaped),
        }
        if node.name in of_views:
            return of_views[node.name](node)
        if node.name == "convert_element_type" or node.name in _SAME:
            (source,) = node.args
            return self.number(source, type_of(node.dtype))
        result = type_of(node.dtype)
        if node.dtype not in _TYPES and not _is_float(node.dtype):
            raise SpecError(f"{self.name} computes with {node.dtype}. Call .astype(int32) first.")
        for rule in (self._arithmetic, self._power, self._logic, self._chosen):
            found = rule(node, result)
            if found is not None:
                return found
        raise self.refusal(node)

    def _slice(self, node: Node) -> View:
        """A part of a captured array that begins where positions say."""
        source, *starts = node.args
        view = self._value(source)
        if not isinstance(view, View):
            raise self.refusal(node)
        indices, axes = list(view.indices), list(view.axes)
        for place, (axis, start) in enumerate(zip(view.axes, starts, strict=True)):
            length, size = node.shape[place], source.shape[place]
            if axis is None or length == size != 1:
                continue
            if length != 1:
                raise self.refusal(node)
            indices[axis], axes[place] = self.number(_counted(start, size), kept=True), None
        return View(view.capture, indices, axes)

    def _reshaped(self, node: Node) -> str | View:
        """Drop axes of length 1, or add some."""
        (source, *_) = node.args
        view = self._value(source)
        if not isinstance(view, View):
            if math.prod(node.shape) != 1:
                raise self.refusal(node)
            return view
        left = [axis for axis in view.axes if axis is not None]
        sizes = [n for n in node.shape if n != 1]
        own = [n for n, axis in zip(source.shape, view.axes, strict=True) if axis is not None]
        if sizes != own:
            raise self.refusal(node)
        places = iter(left)
        axes = [None if n == 1 else next(places) for n in node.shape]
        return View(view.capture, view.indices, axes)

    def _arithmetic(self, node: Node, result: str) -> str | None:
        """Sums, products and quotients, and functions of one number."""
        name, emit, (first, *rest) = node.name, self.built.emit, node.args
        if name in _UNARY and (result == "f" or name in ("abs", "neg", "sign")):
            return emit(_UNARY[name], result, self.number(first, result))
        if name == "round" and node.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN:
            return emit("round", result, self.number(first, result))
        if name in _BINARY:
            x, y = (self.number(each, result) for each in node.args)
            return emit(_BINARY[name], result, x, y)
        if name == "div" and result == "f":
            return self._quotient(first, *rest)
        if name in ("div", "rem") and result in ("i", "l"):
            x, y = (self.number(each, result, kept=each in rest) for each in node.args)
            return emit("tdiv" if name == "div" else "fmod", result, x, y)
        return None

    def _quotient(self, first: Node, second: Node) -> str:
        """A quotient of floats, exact of integers, of which a floor shows the last bit."""
        x, emit = self.number(first, "f"), self.built.emit
        is_whole = self.built.is_whole
        if not second.inputs and not second.reads and not is_whole(x):
            divisor = float(_item(second))
            factor = 1 / divisor if divisor else math.copysign(math.inf, divisor)
            return emit("mul", "f", x, self.built.constant(factor, "f"))
        y = self.number(second, "f")
        exact = is_whole(x) and (is_whole(y) or not (second.inputs or second.reads))
        return emit("ratio" if exact else "div", "f", x, y)

    def _power(self, node: Node, result: str) -> str | None:
        emit, (first, *rest) = self.built.emit, node.args
        if node.name == "square":
            x = self.number(first, result)
            return emit("mul", result, x, x)
        if node.name == "one_minus_square":  # in tanh's slope, from JAX 0.11 on
            x = self.number(first, result)
            one = self.built.constant(1, result)
            return emit("mul", result, emit("add", result, one, x), emit("sub", result, one, x))
        if node.name == "integer_pow" and abs(whole := node.params["y"]) <= _MOST_POWER:
            x = self.number(first, result)
            found = x if whole else self.built.constant(1, result)
            for _ in range(abs(whole) - 1):
                found = emit("mul", result, found, x)
            return emit("recip", "f", found) if whole < 0 else found
        if node.name in ("pow", "integer_pow") and result == "f":
            given = [self.number(each, "f", kept=True) for each in rest]
            y, *_ = [*given, f"f:{float(node.params.get('y', 0))}"]
            return emit("pow", "f", self.number(first, "f"), y)
        return None

    def _logic(self, node: Node, result: str) -> str | None:
        """Comparisons, and operations on bits and booleans."""
        name, emit, (first, *rest) = node.name, self.built.emit, node.args
        if name in _COMPARED:
            x, y = (self.number(each, type_of(first.dtype)) for each in node.args)
            return emit(name, "b", x, y)
        if name in ("and", "or", "xor"):
            x, y = (self.number(each, result) for each in node.args)
            return emit(name, result, x, y)
        if name == "not":
            return emit("not" if result == "b" else "invert", result, self.number(first))
        if name in _SHIFTS and result in ("i", "l"):
            (places,) = (self.number(each, "i", kept=True) for each in rest)
            return emit(_SHIFTS[name], result, self.number(first, result), places)
        return None

    def _chosen(self, node: Node, result: str) -> str | None:
        """Choices between numbers, and limits of one."""
        emit = self.built.emit
        which, *cases = node.args
        if node.name == "select_n" and type_of(which.dtype) == "b":
            if (rest := _remainder(node)) is not None and result in ("i", "l"):
                x, y = (self.number(each, result, kept=n > 0) for n, each in enumerate(rest.args))
                return emit("mod", result, x, y)
            other, one = cases
            x, y = self.number(one, result), self.number(other, result)
            return emit("where", result, self.number(which, "b"), x, y)
        if node.name == "clamp":
            low, x, high = (self.number(each, result) for each in node.args)
            return emit("min", result, emit("max", result, x, low), high)
        return None


def type_of(dtype: str) -> str:
    """The type of a value of a dtype."""
    return "f" if _is_float(dtype) else _TYPES.get(dtype, "i")


def _is_float(dtype: str) -> bool:
    return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))


def element_of(array: Array) -> str:
    """The name of the dtype in which kernels read a captured array."""
    if _is_float(array.dtype.name):
        return "float32"
    return array.dtype.name if array.dtype.name in ELEMENTS else "int32"


def _item(node: Node) -> Any:
    """The number that a node is."""
    return np.asarray(node.evaluate()).item()


def _is_number(node: Node, value: int) -> bool:
    return not node.inputs and not node.reads and not node.shape and _item(node) == value


def _counted(start: Node, size: int) -> Node:
    """The index that jnp makes a place of, which it counts from the end where it is negative, as a
    program's loads do."""
    if start.name != "select_n" or len(start.args) != 3:
        return start
    is_negative, index, from_end = start.args
    is_it = _is_sum(from_end, index, size) and _is_sign_of(is_negative, index)
    return index if is_it else start


def _is_sum(node: Node, first: Node, second: Node | int) -> bool:
    """Whether a node is the sum of these."""
    if node.name != "add":
        return False
    x, y = node.args
    return x is first and (_is_number(y, second) if isinstance(second, int) else y is second)


def _is_compared(node: Node, name: str, first: Node) -> bool:
    """Whether a node says whether another one is less than 0, `lt`, or is not, `ne`."""
    if node.name != name:
        return False
    x, y = node.args
    return x is first and _is_number(y, 0)


def _is_sign_of(node: Node, number: Node) -> bool:
    """Whether a node says that a number is negative."""
    return _is_compared(node, "lt", number)


def _remainder(node: Node) -> Node | None:
    """The `rem` of a choice that makes jnp's remainder of it, whose sign is the divisor's; None
    of any other choice."""
    which, rest, moved = node.args
    if rest.name != "rem" or which.name != "and":
        return None
    (_, divisor), (apart, left) = rest.args, which.args
    if not _is_sum(moved, rest, divisor) or not _is_compared(left, "ne", rest):
        return None
    if apart.name != "ne":
        return None
    one, other = apart.args
    return rest if _is_sign_of(one, rest) and _is_sign_of(other, divisor) else None
