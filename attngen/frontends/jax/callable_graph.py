"""Graphs of functions of positions: what a traced function computes, without calls in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, Literal

from ...errors import SpecError

_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")  # parameters that hold what an operation calls
_BRANCHES = ("cond", "while", "scan")  # which hold these, too
PARTS = ("dynamic_slice", "squeeze", "reshape", "broadcast_in_dim")  # that leave parts of arrays
POSITIONS = ("b", "h", "i", "j")
SCORE = "s"


@dataclass(eq=False)
class Node:
    """A value: the name of the operation that makes it, `input`, `literal`, or `captured`.

    given: the argument's name, the number, or the array; args, params: of an operation, which the
    primitive binds; place: of the value among its results; inputs: names of the arguments that the
    value depends on; reads: whether it depends on a captured array; learns: on one of a trace, but
    for places in arrays, so that it may have a gradient.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    given: Any = None
    args: tuple[Node, ...] = ()
    params: dict[str, Any] = field(default_factory=dict)
    primitive: Any = None
    place: int = 0
    inputs: frozenset[str] = frozenset()
    reads: bool = False
    learns: bool = False

    @property
    def kind(self) -> jax.ShapeDtypeStruct:
        """Its shape and dtype."""
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))

    @property
    def is_part(self) -> bool:
        """Whether it is a part of a captured array, a number of it say."""
        if not self.inputs:
            return self.reads
        source, *_ = (*self.args, self)
        return self.name in PARTS and source.is_part

    def evaluate(self) -> Any:
        """The value of a node that depends on no argument, which it then keeps."""
        if self.given is None:
            self.given = self._evaluated()
        return self.given

    def _evaluated(self) -> Any:
        given = [each.evaluate() for each in self.args]
        if self.reads:
            made = self.primitive.bind(*given, **self.params)
        else:  # a number now, whatever is being traced
            with jax.ensure_compile_time_eval():
                made = self.primitive.bind(*given, **self.params)
        return made[self.place] if self.primitive.multiple_results else made


def arguments(names: Sequence[str]) -> tuple[Node, ...]:
    """Numbers of these names, the score and positions, as a function's arguments."""
    dtypes = ["float32" if each == SCORE else "int32" for each in names]
    return tuple(
        Node("input", (), dtype, each, inputs=frozenset({each}))
        for each, dtype in zip(names, dtypes, strict=True)
    )


def traced(name: str, function: Callable[..., Any], inputs: Sequence[Node]) -> ClosedJaxpr:
    """A function of these arguments. name: of the argument that it is.

    Raises: SpecError that says what it does wrong.
    """
    try:
        made = jax.make_jaxpr(function)(*[each.kind for each in inputs])
    except jax.errors.ConcretizationTypeError as error:
        raise SpecError(
            f"{name} has data-dependent control flow, which no trace can follow. Choose by "
            "jnp.where."
        ) from error
    return ClosedJaxpr(made.jaxpr, [*map(_as_array, made.consts)])


def _as_array(constant: Any) -> Array:
    """A captured array, of a trace where it was one."""
    if isinstance(constant, Array):
        return constant
    with jax.ensure_compile_time_eval():
        return jnp.asarray(constant)


def graph_of(name: str, function: Callable[..., Any], inputs: Sequence[Node]) -> list[Node]:
    """The results of a function of these arguments. Raises: as `traced`."""
    return results_of(traced(name, function, inputs), inputs)


class ResultError(SpecError):
    """A function that returns no number, whatever computes it."""


def check_result(name: str, results: Sequence[Node], kind: str) -> Node:
    """The result of a function. Raises: ResultError where it is no number of such a kind of dtypes,
    `floating` or `bool`."""
    first, *others = results
    if others:
        raise ResultError(f"{name} returns {len(results)} results; one {kind} is needed")
    wanted = jnp.floating if kind == "floating" else jnp.bool_
    if first.shape or not jnp.issubdtype(jnp.dtype(first.dtype), wanted):
        raise ResultError(f"{name} returns {first.dtype}{list(first.shape)}; one {kind} is needed")
    return first


def results_of(closed: Any, inputs: Sequence[Node]) -> list[Node]:
    """The results of a closed program of these arguments."""
    jaxpr = getattr(closed, "jaxpr", closed)
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    constants = getattr(closed, "consts", ())
    for variable, given in zip(jaxpr.constvars, constants, strict=True):
        x = _as_array(given)
        learns = isinstance(x, jax.core.Tracer)
        node = Node("captured", tuple(x.shape), x.dtype.name, x, reads=True, learns=learns)
        known[variable] = node

    def node_of(atom: Any) -> Node:
        if isinstance(atom, Literal):
            kind: Any = atom.aval
            return Node("literal", tuple(kind.shape), kind.dtype.name, atom.val)
        found: Node = known[atom]
        return found

    for equation in jaxpr.eqns:
        args = tuple(map(node_of, equation.invars))
        known |= zip(equation.outvars, _made(equation, args), strict=True)
    return [node_of(each) for each in jaxpr.outvars]


def _made(equation: Any, args: tuple[Node, ...]) -> list[Node]:
    """The values that an operation makes, of a call those of what it calls."""
    primitive, params = equation.primitive, equation.params
    called = [params[key] for key in _CALLED if key in params]
    if called and primitive.name not in _BRANCHES:
        first, *_ = called
        return results_of(first, args)
    inputs = reduce(frozenset.union, [each.inputs for each in args], frozenset[str]())
    reads = any(each.reads for each in args)
    sources = args[:1] if inputs and primitive.name in PARTS else args
    learns = any(each.learns for each in sources)
    return [
        Node(
            primitive.name, tuple(x.aval.shape), x.aval.dtype.name,
            args=args, params=params, primitive=primitive, place=n, inputs=inputs, reads=reads,
            learns=learns,
        )
        for n, x in enumerate(equation.outvars)
    ]  # fmt: skip
