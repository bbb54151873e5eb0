"""Lines of programs: nodes of a graph of torch's operations, each in terms of a program's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ....errors import SpecError
from ....fragments.building import Number
from .builder import Builder, View, type_of
from .trace import aten, captured, depends_of, is_mutable, meta_of, name_of

_SAME = frozenset(
    "detach clone alias view expand squeeze unsqueeze lift_fresh lift_fresh_copy reshape".split()
)
_UNARY = frozenset(
    "exp exp2 log log2 log1p expm1 sin cos tanh sqrt rsqrt erf sigmoid floor ceil trunc round abs "
    "neg sign".split()
)
_COMPARED = frozenset("ge gt le lt eq ne".split())
_BINARY = {"add": "add", "sub": "sub", "mul": "mul", "minimum": "min", "maximum": "max"}
_BITS = {"and": "and", "or": "or", "xor": "xor"}
# Integers of fewer bits than programs compute with: all of their bits, and that of the sign.
_NARROW = {torch.uint8: (0xFF, 0), torch.int8: (0xFF, 0x80), torch.int16: (0xFFFF, 0x8000)}
_IN_RANGE = _SAME | frozenset("where masked_fill minimum maximum sign".split())
_MOST_POWER = 8  # of a whole exponent that becomes products


class Lines:
    """A graph's nodes, made into operations where they are asked for."""

    def __init__(
        self,
        builder: Builder,
        graph: GraphModule,
        given: Sequence[str],
        name: str,
        lines: Mapping[str, str],
    ) -> None:
        self.builder, self.graph, self.name, self.lines = builder, graph, name, lines
        self.depends = depends_of(graph, given)
        inputs = (node for node in graph.graph.nodes if node.op == "placeholder")
        self.values: dict[Node, str | View] = dict(zip(inputs, given, strict=True))
        self.before: dict[Node, Any] = {}

    def evaluate(self, node: Any) -> Any:
        """The value, by torch, of a node that depends on no position."""
        if not isinstance(node, Node):
            return node
        if node not in self.before:
            if node.op == "get_attr":
                self.before[node] = captured(self.graph, node)
            else:
                self.check_pure(node)
                args, kwargs = map_arg((node.args, node.kwargs), self.evaluate)
                if str(kwargs.get("device")) == "meta" and not self.depends[node]:
                    kwargs = {**kwargs, "device": "cpu"}  # where numbers have values
                target: Any = node.target
                self.before[node] = target(*args, **kwargs)
        return self.before[node]

    def check_pure(self, node: Node) -> None:
        target: Any = node.target
        if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
            raise self.refusal(
                node, "draws random numbers", "Draw them before the call and read them at "
                "(b, h, i, j), or pass dropout_p."
            )  # fmt: skip
        if is_mutable(node):
            raise self.refusal(node, "changes a tensor in place", "Return a new tensor instead.")

    def refusal(self, node: Node, what: str, way_out: str) -> SpecError:
        where = _line_of(name_of(node), self.lines)
        return SpecError(f"{self.name} {what}{where}. {way_out}")

    def _unknown(self, node: Node) -> SpecError:
        operation = str(node.target).removeprefix("aten.")
        return self.refusal(
            node, f"has an operation that kernels lack, {operation},",
            "Compute what depends on no position before the call, or pass backend='reference'.",
        )  # fmt: skip

    def view(self, node: Node) -> str | View:
        """A node's value, which may be a tensor that is no number yet."""
        if node not in self.values:
            if self.depends[node] <= frozenset("c"):
                self.values[node] = self._before_launch(node)
            else:
                self.check_pure(node)
                self.values[node] = self.lower(node)
        return self.values[node]

    def _before_launch(self, node: Node) -> str | View:
        if node.op == "call_function" and node.target is aten.select.int and self._is_read(node):
            return self._select(node)
        found = self.evaluate(node)
        if "c" in self.depends[node] or found.ndim:
            return self.builder.view(found, (self.graph, node))
        return self.builder.constant(found.item(), type_of(found.dtype))

    def _is_read(self, node: Node) -> bool:
        source, *_ = node.args
        return isinstance(source, Node) and "c" in self.depends[source]

    def number(self, x: Any, type_: str | None = None, kept: bool = False) -> str:
        """A node or number as a value, of that type; kept: whether a number is part of the
        program."""
        if not isinstance(x, Node):
            own = "b" if isinstance(x, bool) else "i" if isinstance(x, int) else "f"
            if (type_ or own) == "i" and not -(1 << 31) <= x < 1 << 31:
                raise SpecError(f"{self.name} computes with {x} in int32. Call .long() first.")
            return self.builder.constant(x, type_ or own, kept)
        if kept and not self.depends[x]:
            return self.builder.constant(self.evaluate(x).item(), type_ or "f", kept)
        value = self.view(x)
        if isinstance(value, View):
            if None in value.indices:
                raise self.refusal(
                    x, "reads a row of a captured tensor", "Read one number a position, as t[b, h]."
                )
            self.values[x] = value = self.builder.load(value)
        own = type_of(meta_of(self.graph, x).dtype)
        if type_ is None or own == type_:
            return value
        _, is_literal, word = value.partition(":")
        if is_literal and type_ != "b":
            return f"{type_}:{float(word) if type_ == 'f' else int(float(word))}"
        return self.builder.emit("cast", type_, value)

    def constant_of(self, x: Any) -> Number | None:
        """The number that an argument is in all positions; None where it is none."""
        if not isinstance(x, Node):
            return x if isinstance(x, (int, float)) else None
        if self.depends[x]:
            return None
        found: Number = self.evaluate(x).item()
        return found

    def lower(self, node: Node) -> str | View:
        """The value of a node that depends on a position."""
        if node.target is aten.index.Tensor:
            return self._index(node)
        if node.target is aten.select.int:
            return self._select(node)
        name = name_of(node)
        result = type_of(node.meta["val"].dtype)
        for rule in (self._plain, self._arithmetic, self._logic, self._chosen):
            found = rule(node, name, result)
            if found is not None:
                return self._wrapped(found, name, node.meta["val"].dtype)
        raise self._unknown(node)

    def _wrapped(self, value: str, name: str, dtype: torch.dtype) -> str:
        """A value as integers of a dtype's bits have it, which programs compute in 32."""
        if dtype not in _NARROW or name in _IN_RANGE:
            return value
        mask, sign = _NARROW[dtype]
        low = self.builder.emit("and", "i", value, f"i:{mask}")
        if not sign:
            return low
        flipped = self.builder.emit("xor", "i", low, f"i:{sign}")
        return self.builder.emit("sub", "i", flipped, f"i:{sign}")

    def _index(self, node: Node) -> View:
        tensor, places = node.args
        view = self.view(tensor)  # type: ignore[arg-type]
        if not isinstance(view, View):
            raise self._unknown(node)
        left = [axis for axis, each in enumerate(view.indices) if each is None]
        indices = list(view.indices)
        for axis, place in zip(left, places, strict=False):  # type: ignore[arg-type]
            if place is not None:
                dtype = meta_of(self.graph, place).dtype
                if dtype in (torch.bool, torch.uint8) or dtype.is_floating_point:
                    raise self._unknown(node)
                indices[axis] = self.number(place)
        return View(view.capture, indices)

    def _select(self, node: Node) -> View:
        tensor, axis, place = node.args
        view = self.view(tensor)  # type: ignore[arg-type]
        if not isinstance(view, View):
            raise self._unknown(node)
        left = [at for at, each in enumerate(view.indices) if each is None]
        indices = list(view.indices)
        indices[left[axis]] = f"i:{place}"  # type: ignore[index]
        return View(view.capture, indices)

    def _plain(self, node: Node, name: str, result: str) -> str | None:
        """Operations of one number, and those that make one of none."""
        first, *_ = (*node.args, None)
        *_, last = (None, *node.args)
        if name in _SAME:
            return self.number(first)
        if name in ("_to_copy", "to", "convert_element_type"):
            return self.number(first, result)
        if name == "copy":
            return self.number(last, result)
        if name in ("scalar_tensor", "full", "full_like", "new_full"):
            return self.number(last, result)
        made = name.removeprefix("new_").removesuffix("_like")
        if made in ("ones", "zeros"):
            return self.builder.constant(int(made == "ones"), result)
        if name in ("logical_not", "bitwise_not"):
            is_bool = name == "logical_not" or result == "b"
            x = self.number(first, "b" if is_bool else result)
            return self.builder.emit("not" if is_bool else "invert", result, x)
        name = {"sgn": "sign"}.get(name, name)
        if name == "relu":
            return self.builder.emit(
                "max", result, self.number(first, result), self.builder.constant(0, result)
            )
        if name == "reciprocal":
            return self.builder.emit("recip", result, self.number(first, result))
        if name not in _UNARY or (result != "f" and name not in ("abs", "neg", "sign")):
            return None
        return self.builder.emit(name, result, self.number(first, result))

    def _arithmetic(self, node: Node, name: str, result: str) -> str | None:
        """Sums, products, quotients and powers."""
        first, second, *_ = (*node.args, None)
        emit, number = self.builder.emit, self.number
        if name in ("add", "sub", "rsub", "mul") or name in _BINARY:
            x, y = number(first, result), number(second, result)
            if (factor := node.kwargs.get("alpha", 1)) != 1:
                y = emit("mul", result, y, number(factor, result))
            if name == "rsub":
                return emit("sub", result, y, x)
            return emit(_BINARY[name], result, x, y)
        if name == "div" and result == "f" and node.kwargs.get("rounding_mode") is None:
            return self._quotient(first, second)
        rounds = {"floor_divide": "fdiv", "remainder": "mod", "fmod": "fmod"}.get(name)
        if name == "div":
            rounds = {"floor": "fdiv", "trunc": "tdiv"}[str(node.kwargs["rounding_mode"])]
        if rounds is not None and result in ("i", "l"):
            return emit(rounds, result, number(first, result), number(second, result, True))
        if name == "pow":
            return self._power(node, result)
        return None

    def _quotient(self, first: Any, second: Any) -> str:
        """A quotient of floats, exact of integers and in masks, where a floor shows the last
        bit."""
        x, divisor = self.number(first, "f"), self.constant_of(second)
        is_exact = self.name == "mask_mod" or self.builder.is_whole(x)
        if divisor is not None and not is_exact:
            whole = 1 / float(divisor) if divisor else math.inf * math.copysign(1, divisor)
            return self.builder.emit("mul", "f", x, self.builder.constant(whole, "f"))
        y = self.number(second, "f")
        is_exact = is_exact and (divisor is not None or self.builder.is_whole(y))
        return self.builder.emit("ratio" if is_exact else "div", "f", x, y)

    def _power(self, node: Node, result: str) -> str | None:
        base, exponent = node.args
        power = self.constant_of(exponent)
        emit = self.builder.emit
        if power is None or not isinstance(base, Node):
            x, y = self.number(base, "f"), self.number(exponent, "f")
            return emit("pow", "f", x, y) if result == "f" else None
        x = self.number(base, result)
        whole = int(power) if power == int(power) else None
        if whole is not None and abs(whole) <= _MOST_POWER and (whole >= 0 or result == "f"):
            found = self.builder.constant(1, result)
            for time in range(abs(whole)):
                found = emit("mul", result, found, x) if time else x
            return emit("recip", "f", found) if whole < 0 else found
        if result != "f":
            return None
        if abs(power) == 0.5:
            return emit("sqrt" if power > 0 else "rsqrt", "f", x)
        return emit("pow", "f", x, self.builder.constant(power, "f", True))

    def _logic(self, node: Node, name: str, result: str) -> str | None:
        """Comparisons, and operations on bits and booleans."""
        first, second, *_ = (*node.args, None)
        args = first, second
        if name in _COMPARED:
            parts = [meta_of(self.graph, x) if isinstance(x, Node) else x for x in args]
            common = type_of(torch.result_type(*parts))  # type: ignore[arg-type]
            x, y = (self.number(each, common) for each in args)
            return self.builder.emit(name, "b", x, y)
        if "shift" in name and result in ("i", "l"):
            way = "shl" if "left" in name or "lshift" in name else "shr"
            x, y = self.number(first, result), self.number(second, "i", True)
            return self.builder.emit(way, result, x, y)
        if name == "isnan":
            x = self.number(first)
            return self.builder.emit("ne", "b", x, x)
        kind, _, operation = name.strip("_").rpartition("_")
        if operation not in _BITS or kind not in ("logical", "bitwise", ""):
            return None
        type_ = "b" if kind == "logical" else result
        x, y = (self.number(each, type_) for each in args)
        return self.builder.emit(_BITS[operation], result, x, y)

    def _chosen(self, node: Node, name: str, result: str) -> str | None:
        """Choices between numbers, and limits of one."""
        given: tuple[Any, ...] = (*node.args, None, None)
        first, second, third, *_ = given
        emit, number = self.builder.emit, self.number
        if name == "where" and third is not None:
            x, y = number(second, result), number(third, result)
            return emit("where", result, number(first, "b"), x, y)
        if name == "masked_fill":
            x, y = number(third, result), number(first, result)
            return emit("where", result, number(second, "b"), x, y)
        if name not in ("clamp", "clamp_min", "clamp_max"):
            return None
        sides = ("max",) if name == "clamp_max" else ("min", "max")
        bounds: dict[str, Any] = dict(zip(sides, (second, third), strict=False))
        bounds |= {key: x for key, x in node.kwargs.items() if key in ("min", "max")}
        found = number(first, result)
        for side, way in (("min", "max"), ("max", "min")):
            if bounds.get(side) is not None:
                found = emit(way, result, found, number(bounds[side], result))
        return found


def _line_of(operation: str, lines: Mapping[str, str]) -> str:
    """Where a callable says an operation of torch, to be put behind a verb; empty where nobody
    knows. lines: places by the names of functions, as the callable calls them."""
    for name, place in lines.items():
        if name and (name in operation or operation in name):
            return place
    return ""
